"""The images of the operator and the trainer: content, rights and size. Also a user's image, based on the trainer's."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_kit import BUILD_SECONDS, ROOT, TARGETS, Images, Unavailable, call, images

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
    """Run code in a container of the image, and return the JSON that it prints."""
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
    """The comparison includes files other than Python, which pyproject.toml must list as package data."""
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
