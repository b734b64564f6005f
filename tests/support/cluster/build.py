"""The programs of the control plane and of real nodes, built or fetched from Debian's packages.

They are made once and kept outside the checkout. BAMBOO_KUBERNETES may name a folder with other Kubernetes binaries.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import cgroups

GIVEN = "BAMBOO_KUBERNETES"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
BUILT_VERSION = "1.20.2"
RECIPE, NODE_RECIPE, DEBIAN = (Path(__file__).with_name(name) for name in ("kubernetes.sh", "node.sh", "debian.sh"))
BUILD_TOOLS = ("bash", "apt-get", "dpkg-deb", "tar", "gzip")
RUN_TOOLS = ("openssl", "setpriv", "unshare")
NODE_TOOLS = ("ip", "ldd", "mount", "nsenter")
VERSION_SECONDS = 60
FETCHED = "unpacking"  # what a recipe says once it has all packages
Report = Callable[[str], None]


class Unavailable(Exception):
    """Raised if this machine cannot build or run the test cluster. The message is one sentence."""


class Broken(Exception):
    """Raised if BAMBOO_KUBERNETES lacks one of PROGRAMS, a version is unknown, or a build fails after the fetch."""


def to_stderr(line: str) -> None:
    print(f"test cluster: {line}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    home = os.environ.get("BAMBOO_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "bamboo"


def binaries(report: Report = to_stderr) -> Path:
    """Return the folder with etcd and the kube-* programs. Building them takes minutes. Raises Unavailable, Broken."""
    _require(RUN_TOOLS)
    if given := os.environ.get(GIVEN):
        return _complete(Path(given))
    return _made(f"Kubernetes {BUILT_VERSION}", "3 to 6 minutes on 2 cores", RECIPE, (BUILT_VERSION, *PROGRAMS), report)


@dataclass(frozen=True, slots=True)
class NodePrograms:
    """The programs of a real node. kubelet: its path. root: a folder, laid out like /, with all other programs."""

    kubelet: Path
    root: Path


def node_programs(report: Report = to_stderr) -> NodePrograms:
    """Return a real node's programs, built or fetched if needed. Raises Unavailable, Broken."""
    if os.geteuid() != 0:
        raise Unavailable("real nodes need root")
    if not cgroups.are_there():
        raise Unavailable(
            f"real nodes need cgroups of version 1 below {cgroups.HIERARCHIES}; kind has nodes for others"
        )
    _require((*RUN_TOOLS, *NODE_TOOLS))
    given = os.environ.get(GIVEN)
    if given and not os.access(Path(given, "kubelet"), os.X_OK):
        raise Unavailable(f"real nodes need a kubelet, and {GIVEN}={given} has none")
    root = _made("a node's programs", "half a minute", NODE_RECIPE, (), report)
    if given:
        return NodePrograms(Path(given, "kubelet").absolute(), root)
    arguments = (BUILT_VERSION, "kubelet")
    built = _made(f"the kubelet of Kubernetes {BUILT_VERSION}", "2 minutes on 2 cores", RECIPE, arguments, report)
    return NodePrograms(built / "kubelet", root)


def _made(what: str, time: str, recipe: Path, arguments: tuple[str, ...], report: Report) -> Path:
    """Return a recipe's output folder, which stays cached until the recipe, debian.sh or the arguments change."""
    recipes = b"".join(path.read_bytes() for path in (recipe, DEBIAN))
    digest = hashlib.sha256(recipes + " ".join(arguments).encode()).hexdigest()[:12]
    name = f"{recipe.stem}-{digest}"
    cache = cache_folder()
    done = cache / name
    if done.is_dir():
        return done
    _require(BUILD_TOOLS)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{name}.lock", report) as lock:
        if not done.is_dir():
            report(f"making {what} in {done}, once; this takes {time}")
            unfinished = cache / f"{name}.unfinished"
            _remove(unfinished)
            _run_recipe(what, [str(recipe), str(unfinished), *arguments], lock, report)
            (unfinished / "bin").rename(done)
            _remove(unfinished)
    return done


def minor_version(program: Path) -> int:
    """Return the minor version of a Kubernetes program: 36 for 1.36. Raises Broken."""
    asked = [str(program), "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=VERSION_SECONDS).stdout
    found = re.match(r"Kubernetes v1\.(\d+)\.", told)
    if found is None:
        raise Broken(f"{' '.join(asked)} was expected to say Kubernetes v1.x.y; it says: {told.strip()}")
    return int(found[1])


def _complete(folder: Path) -> Path:
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        raise Broken(f"{GIVEN}={folder} was expected to have {', '.join(PROGRAMS)}; missing: {', '.join(missing)}")
    return folder.absolute()


def _require(tools: tuple[str, ...]) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        raise Unavailable(f"the test cluster needs Debian 12 with {', '.join(tools)}; missing: {', '.join(missing)}")


@contextmanager
def locked(path: Path, report: Report = to_stderr) -> Iterator[int]:
    """Hold an exclusive lock on a file, after waiting for it if needed. Yield the file's descriptor."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is at it; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _run_recipe(what: str, command: list[str], lock: int, report: Report) -> None:
    """Run a recipe. Raises Unavailable if it cannot fetch the packages, Broken if it fails later. The recipe inherits
    the lock: if this process is killed, no other process builds until the recipe's last compiler has ended.
    """
    tail: deque[str] = deque(maxlen=20)
    fetched = False
    with subprocess.Popen(
        ["bash", *command],
        text=True,
        pass_fds=(lock,),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as recipe:
        try:
            assert recipe.stdout is not None
            for line in recipe.stdout:
                tail.append(line.rstrip())
                report(tail[-1])
                fetched = fetched or FETCHED in line
            code = recipe.wait()
        except BaseException:
            os.killpg(recipe.pid, signal.SIGKILL)
            raise
    if code and not fetched:
        why = tail[-1] if tail else f"exit code {code}"
        raise Unavailable(f"the test cluster is built from Debian's packages, which cannot be had: {why}")
    if code:
        raise Broken(f"making {what} failed with exit code {code}:\n" + "\n".join(tail))


def _remove(folder: Path) -> None:
    """Remove a folder if it exists, even if Go has made parts of its caches in it read-only."""
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=False)
        shutil.rmtree(folder)
