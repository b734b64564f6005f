"""The container images, built for tests by buildah from Debian's packages and downloaded wheels, and run by podman.

Images and wheels are kept in the tests' cache folder, apart from the machine's own images.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.build import cache_folder, locked

ROOT = Path(__file__).parents[2]
TOOLS = ("debootstrap", "buildah", "podman", "runc")
RUN_FOLDER = Path("/run/bamboo-images")
SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python-is-python3")
UNNEEDED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
BASE_SECONDS, WHEELS_SECONDS, BUILD_SECONDS, RUN_SECONDS = 900, 900, 900, 120
TARGETS = {"operator": ("core", "client", "operator"), "trainer": ("core", "client", "trainer")}


class Unavailable(Exception):
    """Raised if this machine cannot build images. The message is one sentence."""


def require() -> None:
    """Raise Unavailable unless this process runs as root on Linux and all TOOLS are installed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("images are built and run by root on Linux")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise Unavailable(f"images need {', '.join(missing)}: apt-get install {' '.join(missing)}")


@dataclass(frozen=True, slots=True)
class Store:
    """A store of images in a folder, apart from the machine's own store."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        return ["--root", str(self.folder / "storage"), "--runroot", str(RUN_FOLDER / "storage")]

    def podman(self, *arguments: str) -> list[str]:
        """Return a podman command. It uses runc, since podman's default, crun, does not support cgroup v1."""
        return [
            "podman",
            *self.flags,
            "--tmpdir",
            str(RUN_FOLDER / "libpod"),
            "--runtime",
            "runc",
            "--cgroup-manager",
            "cgroupfs",
            *arguments,
        ]

    def build(self, context: Path, wheels: Path, *options: str) -> list[str]:
        """Return the buildah command that builds an image from the Dockerfile."""
        return [
            "buildah",
            *self.flags,
            "build",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--pull-never",
            "--build-context",
            f"wheels={wheels}",
            *options,
            str(context),
        ]

    def run(self, image: str, *command: str, entrypoint: str | None = None, tmp: bool = True) -> str:
        """Run a `confined` container, and return its standard output. Raises AssertionError or TimeoutExpired."""
        options = [] if entrypoint is None else ["--entrypoint", entrypoint]
        return call(self.podman("run", "--rm", *confined(tmp), *options, image, *command), RUN_SECONDS)

    def inspect(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(call(self.podman("image", "inspect", image), RUN_SECONDS))[0]
        return found

    def has(self, image: str) -> bool:
        command = self.podman("image", "exists", image)
        return subprocess.run(command, capture_output=True, timeout=RUN_SECONDS, check=False).returncode == 0


def confined(tmp: bool = True) -> list[str]:
    """Return podman's options for a container confined like a worker's, on the host's network. tmp: mount a /tmp."""
    return [
        "--read-only",
        "--read-only-tmpfs=false",
        *(["--tmpfs", "/tmp"] if tmp else []),
        "--cap-drop",
        "all",
        "--security-opt",
        "no-new-privileges",
        "--network",
        "host",
        "--pull",
        "never",
        "--ulimit",
        "nofile=20000:20000",
        "--ulimit",
        "nproc=20000:20000",
    ]


def call(command: Sequence[str], seconds: float) -> str:
    """Run a command, return its standard output. Raises AssertionError if it fails, TimeoutExpired after `seconds`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Images:
    """The names of the built images, their store, and the folder of wheels for their builds."""

    store: Store
    # base, operator, trainer: names of images
    base: str
    wheels: Path
    operator: str
    trainer: str


def archived(built: Images, folder: Path) -> list[Path]:
    """Save the operator's and the trainer's images as archives for a node to import, and return the archives' paths."""
    archives = {name: folder / f"{index}.tar" for index, name in enumerate((built.operator, built.trainer))}
    for name, archive in archives.items():
        call(
            built.store.podman("save", "--quiet", "--format", "docker-archive", "-o", str(archive), name), BUILD_SECONDS
        )
    return [*archives.values()]


def images() -> Images:
    """Build base, operator and trainer images, reusing layers. Raises Unavailable, AssertionError or TimeoutExpired."""
    require()
    store = Store(cache_folder() / "images")
    store.folder.mkdir(parents=True, exist_ok=True)
    RUN_FOLDER.mkdir(mode=0o700, exist_ok=True)
    with locked(store.folder / "lock"):
        base, wheels = _base(store), _wheels(store)
        built = {target: _build(store, target, base, wheels) for target in TARGETS}
    return Images(store, base, wheels, **built)


def _base(store: Store) -> str:
    """Return the name of the base image (Debian, Python), built if missing. Raises Unavailable if debootstrap fails."""
    recipe = repr((SUITE, BASE_PACKAGES, UNNEEDED))
    tag = f"localhost/bamboo-base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if store.has(tag):
        return tag
    with tempfile.TemporaryDirectory(dir=store.folder, prefix="base-") as folder:
        tree, archive = Path(folder, "tree"), Path(folder, "base.tar")
        include = f"--include={','.join(BASE_PACKAGES)}"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, str(tree)],
            capture_output=True,
            text=True,
            timeout=BASE_SECONDS,
            check=False,
        )
        if made.returncode:
            why = (made.stdout + made.stderr).strip().splitlines()[-1:]
            raise Unavailable(f"the base image is made of Debian's packages, which cannot be had: {''.join(why)}")
        for name in UNNEEDED:
            shutil.rmtree(tree / name)
            (tree / name).mkdir()
        call(["tar", "-C", str(tree), "--numeric-owner", "-cf", str(archive), "."], BASE_SECONDS)
        call(store.podman("import", str(archive), tag), BASE_SECONDS)
    return tag


def _wheels(store: Store) -> Path:
    """Return a folder with the wheels of all dependencies, downloaded again if constraints or pyproject.toml change."""
    folder = store.folder
    parts = ("core", "client", "operator", "trainer")
    recipes = [ROOT / "constraints.txt", *(ROOT / part / "pyproject.toml" for part in parts)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in recipes)).hexdigest()[:12]
    done = folder / f"wheels-{digest}"
    if done.is_dir():
        return done
    wanted = {"setuptools"}
    for path in recipes[1:]:
        project = tomllib.loads(path.read_text())["project"]
        lines = sum(project.get("optional-dependencies", {}).values(), project["dependencies"])
        wanted.update(line for line in lines if not line.startswith("bamboo"))
    for old in folder.glob("wheels-*"):
        shutil.rmtree(old)
    unfinished = folder / "wheels-unfinished"
    call(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--python-version",
            "3.11",
            "--only-binary",
            ":all:",
            "--dest",
            str(unfinished),
            "--constraint",
            str(ROOT / "constraints.txt"),
            *sorted(wanted),
        ],
        WHEELS_SECONDS,
    )
    unfinished.rename(done)
    call(store.podman("image", "prune", "--force"), BUILD_SECONDS)  # layers of the older wheels
    return done


def _build(store: Store, target: str, base: str, wheels: Path) -> str:
    tag = f"localhost/bamboo-{target}:test"
    arguments = {"PYTHON_IMAGE": base, "PIP_ARGS": "--no-index"}
    options = [item for name, value in arguments.items() for item in ("--build-arg", f"{name}={value}")]
    call(store.build(ROOT, wheels, "--layers", *options, "--target", target, "--tag", tag), BUILD_SECONDS)
    return tag
