"""The two images: really built, looked into, and run as the cluster would; two trainers train in containers."""

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_core.control.digests import add_digests
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.job_status import status
from bamboo_core.names import ENV_COORDINATOR, ENV_TOKEN_FILE, ENV_WORKER
from image_kit import BUILD_SECONDS, ROOT, RUN_SECONDS, TARGETS, Images, Store, Unavailable, call, confined, images
from manifest_kit import bamboojob, gpt_task, training
from operator_jobs import digest_of_undisturbed
from processes import Processes

TOKEN_FOLDER = "/var/run/secrets/bamboo.dev"  # noqa: S105 - a path


class Containers:
    """on_exit: called in the loop with (worker, exit code), negative for a signal.

    shared: a file that workers see under the same path.
    """

    def __init__(
        self, store: Store, image: str, folder: Path, on_exit: Callable[[str, int | None], None], shared: Path
    ) -> None:
        self._store, self._image, self._folder, self._on_exit, self._shared = store, image, folder, on_exit, shared
        self._prefix = f"bamboo-test-{secrets.token_hex(4)}"
        self._running: dict[str, asyncio.Task[None]] = {}
        self._killing: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(self._running)

    async def open(self) -> None:
        """Nothing has to be there before the first container."""

    def start(self, worker: str, *, url: str, token: str, zone: str, main: str | None = None) -> None:
        assert not zone
        assert main is None
        secret = self._folder / f"{worker}-token"
        secret.mkdir()
        (secret / "token").write_text(token)
        environment = {ENV_WORKER: worker, ENV_COORDINATOR: url, ENV_TOKEN_FILE: f"{TOKEN_FOLDER}/token"}
        command = self._store.podman(
            "run",
            "--rm",
            "--name",
            f"{self._prefix}-{worker}",
            *confined(),
            *(item for name, value in environment.items() for item in ("--env", f"{name}={value}")),
            "--volume",
            f"{secret}:{TOKEN_FOLDER}:ro",
            "--volume",
            f"{self._shared}:{self._shared}:ro",
            self._image,
        )
        self._running[worker] = asyncio.create_task(self._run(worker, command))

    def signal(self, worker: str, number: int) -> None:
        name = signal.Signals(number).name
        self._killing.append(asyncio.create_task(self._call("kill", "--signal", name, f"{self._prefix}-{worker}")))

    async def close(self) -> None:
        """Removes what is left. Raises if a signal could not be sent."""
        for worker in self.alive:
            await self._call("rm", "--force", "--time", "0", "--ignore", f"{self._prefix}-{worker}")
        await asyncio.gather(*self._running.values(), *self._killing)

    def tail(self, lines: int = 15) -> str:
        """The last lines of each worker."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines()[-lines:])

    async def _run(self, worker: str, command: list[str]) -> None:
        code = None
        try:
            with (self._folder / f"{worker}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
                try:
                    code = await process.wait()
                    code = 128 - code if code > 128 else code
                except asyncio.CancelledError:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
                    raise
        finally:
            del self._running[worker]
            self._on_exit(worker, code)

    async def _call(self, *arguments: str) -> None:
        await asyncio.to_thread(call, self._store.podman(*arguments), RUN_SECONDS)


pytestmark = [pytest.mark.slow, pytest.mark.image, pytest.mark.timeout(2400)]  # the first one builds everything

USER = 65532
MEGABYTE = 1_000_000
MOST_MEGABYTES = {"operator": 90, "trainer": 990}  # over the base image
IN_BASE_ONLY = {"pip", "wheel", "ensurepip"}
SITE = "/opt/bamboo/lib/python3.11/site-packages"
INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({d.name: d.version for d in distributions(path=[PATH])}))
""".replace("PATH", repr(SITE))
LOOK = """
import json, os, shutil

def is_writable(path):
    found = os.lstat(path)
    return not os.path.islink(path) and (found.st_mode & 0o002 or found.st_uid == os.getuid())

trees = [entry for top in ("/opt", "/usr", "/etc", "/licenses") for entry in os.walk(top)]
paths = [os.path.join(folder, name) for folder, folders, files in trees for name in (*folders, *files)]
try:
    open("/opt/bamboo/new", "w")
    refused = None
except OSError as error:
    refused = error.errno
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(), "refused": refused,
    "writable": [path for path in paths if is_writable(path)],
    "compilers": [name for name in ("cc", "gcc", "g++", "clang", "ld", "make") if shutil.which(name)],
    "left": [path for path in ("/src", "/own", "/wheels", "/root/.cache", "/tmp/.cache") if os.path.exists(path)],
    "effective": next(l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")),
}))
"""


FILES = """
import hashlib, json, os
found = {}
for part in ("bamboo", "bamboo_core", "PART"):
    for folder, _, names in os.walk(os.path.join(PATH, part)):
        for name in names:
            path = os.path.join(folder, name)
            if not name.endswith(".pyc"):
                found[os.path.relpath(path, PATH)] = hashlib.sha256(open(path, "rb").read()).hexdigest()
print(json.dumps(found))
""".replace("PATH", repr(SITE))


@pytest.fixture(scope="module")
def built() -> Iterator[Images]:
    try:
        yield images()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=sorted(TARGETS))
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def python(built: Images, target: str, code: str) -> Any:
    """What that prints as JSON in a container of the image."""
    return json.loads(built.store.run(getattr(built, target), "-c", code, entrypoint="python"))


def pins() -> dict[str, str]:
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {canonical(name): version for name, version in lines}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_an_image_has_what_it_needs_in_the_tested_versions(built: Images, target: str) -> None:
    found = {canonical(name): version for name, version in python(built, target, INSTALLED).items()}
    own = {"bamboo-spot", "bamboo-spot-core", f"bamboo-{target}"}
    assert own <= set(found)
    different = {
        name: version
        for name, version in found.items()
        if name not in own and pins().get(name) != version.partition("+")[0]
    }
    assert different == {}, "these are not as in constraints.txt"
    foreign = {"operator": {"torch", "numpy", "safetensors"}, "trainer": {"kopf", "kubernetes", "bamboo-operator"}}
    assert not (foreign[target] | IN_BASE_ONLY) & set(found)


def test_an_image_has_the_very_files_of_the_checkout(built: Images, target: str) -> None:
    """Also those that are no Python, which a distribution must name to have them."""
    package = f"bamboo_{target}"
    expected = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder, name in ((ROOT / "core", "bamboo_core"), (ROOT / "client", "bamboo"), (ROOT / target, package))
        for path in (folder / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert python(built, target, FILES.replace("PART", package)) == expected


def test_a_container_has_no_rights(built: Images, target: str) -> None:
    found = python(built, target, LOOK)
    assert found == {
        "uid": USER,
        "gid": USER,
        "groups": [USER],
        "refused": 30,
        "compilers": [],
        "left": [],
        "writable": [],
        "effective": "0" * 16,
    }


def test_an_image_says_what_it_is(built: Images, target: str) -> None:
    config = built.store.inspect(getattr(built, target))["Config"]
    labels = {name.rpartition(".")[2]: text for name, text in config["Labels"].items() if "opencontainers" in name}
    version = re.search(r'^version = "(.+)"', (ROOT / "core/pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert config["User"] == f"{USER}:{USER}"
    assert (labels["title"], labels["version"]) == (f"bamboo-{target}", version[1])
    assert labels["licenses"] == "Apache-2.0"
    assert call_version(built, target) == version[1]


def call_version(built: Images, target: str) -> str:
    return built.store.run(getattr(built, target), "--version", entrypoint="bamboo", tmp=False).strip()


def test_help_needs_no_file_that_can_be_written(built: Images) -> None:
    assert "--web-listen" in built.store.run(built.operator, "--help", tmp=False)
    assert "BAMBOO_COORDINATOR" in built.store.run(built.trainer, "--help", tmp=False)
    arguments = ("-m", "bamboo_trainer", "--help")  # as the operator starts it
    assert "BAMBOO_COORDINATOR" in built.store.run(built.trainer, *arguments, entrypoint="python", tmp=False)


def test_images_are_small(built: Images, target: str) -> None:
    base, size = (built.store.inspect(name)["Size"] for name in (built.base, getattr(built, target)))
    added = (size - base) / MEGABYTE
    print(f"{target}: {size / MEGABYTE:.0f} MB, of which the base image has {base / MEGABYTE:.0f} MB")
    assert added < MOST_MEGABYTES[target]


def job(text: Path, standby: int) -> dict[str, Any]:
    return bamboojob(
        "contained",
        task=gpt_task(text=str(text)),
        training=training(150, 16, 2),
        topology={"stages": 2},
        standby={"workers": standby},
    )


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM], ids=["calm", "killed", "told"])
def test_two_containers_train_as_two_processes_do(built: Images, tmp_path: Path, number: signal.Signals | None) -> None:
    """The same bits, also if one of them is taken away on the way."""
    text = tmp_path / "text"
    shutil.copyfile(ROOT / "LICENSE", text)
    document = job(text, standby=0 if number is None else 1)
    victims: list[str] = []

    def take(training: Processes) -> None:
        if number is not None and not victims and training.state.step >= 40:
            victims.append(training.owner(0, 1))
            training.signal(victims[0], number)

    training = Processes(document, tmp_path, decide=take)
    training.pool = Containers(built.store, built.trainer, tmp_path, training.exited, text)  # type: ignore[assignment]
    asyncio.run(training.run(300))
    assert training.outcome is Outcome.COMPLETE, training.finish
    assert add_digests(status(training.state, 0.0).digests) == digest_of_undisturbed(document)
    ends = {
        worker: -int(number or 0) if number is signal.SIGKILL and worker in victims else 0 for worker in training.exits
    }
    assert training.exits == ends, training.pool.tail()
    reasons = {told.reason for told in training.emitted}
    assert number is not signal.SIGKILL or "Takeover" in reasons
    assert number is not signal.SIGTERM or "NoticeReceived" in reasons


MODEL = """
from bamboo_trainer.models import mlp

def build(config):
    return mlp.build(config)
"""
PROJECT = """
build-system = {requires = ["setuptools>=77"], build-backend = "setuptools.build_meta"}
project = {name = "spirals", version = "1", dependencies = ["numpy>=2"]}
"""
OWN_IMAGE = """
FROM {trainer}
USER 0
COPY . /tmp/model
RUN --mount=type=bind,from=wheels,target=/wheels \\
    pip --python /opt/bamboo install --no-cache-dir -c /opt/bamboo/constraints.txt {arguments} /tmp/model \\
 && rm -rf /tmp/model
USER 65532:65532
"""


def test_an_image_with_a_model_of_ones_own(built: Images, tmp_path: Path) -> None:
    (tmp_path / "spirals").mkdir()
    (tmp_path / "spirals/__init__.py").write_text(MODEL)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "Dockerfile").write_text(
        OWN_IMAGE.format(trainer=built.trainer, arguments="--no-index --find-links /wheels")
    )
    call(built.store.build(tmp_path, built.wheels, "--tag", "localhost/own:test"), BUILD_SECONDS)
    config = yaml.safe_load((ROOT / "examples/spirals.yaml").read_text())["spec"]["task"]["config"]
    code = f"from bamboo_trainer.loading import load_task; print(len(load_task('spirals:build', {config}).layers))"
    assert int(built.store.run("localhost/own:test", "-c", code, entrypoint="python")) > 2
