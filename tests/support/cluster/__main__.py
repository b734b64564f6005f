"""A test cluster for trying things by hand: `make cluster`, or `python -m cluster up` in the folder tests/support/."""

import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from chart_release import Release
from cluster import build
from cluster.handle import OLDEST_SUPPORTED, STOP_SECONDS, Cluster, ControlFailed, call
from cluster.nodes import usual_nodes
from helm_kit import HelmError, Missing
from operator_process import SYSTEM

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Node = Annotated[str, typer.Argument(help="The node's name")]


def _folder() -> Path:
    return build.cache_folder() / "cluster"


def _call(name: str, **arguments: str) -> object:
    try:
        return call(_folder(), name, **arguments)
    except OSError:
        _fail("no test cluster is running; start one with: make cluster")
    except ControlFailed as error:
        _fail(str(error))


def _fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise typer.Exit(1)


def _running() -> bool:
    try:
        return bool(call(_folder(), "status"))
    except OSError:
        return False


@app.command()
def up() -> None:
    """Start a cluster with Bamboo, unless one runs. The first call builds Kubernetes, which takes some minutes."""
    folder = _folder()
    if not _running():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        try:
            _start_with_bamboo(folder)
        except (build.Unavailable, build.Broken, RuntimeError) as error:
            _fail(str(error))
    print(f"export KUBECONFIG={folder / 'admin.kubeconfig'}")
    print("bamboo submit JOB.yaml --watch   # docs/tutorial.md, My first spot job")
    print("make cluster DO='fail spot-a'    # a node vanishes; DO=down ends the cluster")


def _start_with_bamboo(folder: Path) -> None:
    """Start a cluster with untainted nodes, and install Bamboo's chart. If that fails, stop the cluster and exit."""
    started = Cluster.start(nodes=[replace(spec, taints=()) for spec in usual_nodes()], folder=folder, owned=False)
    if started.minor < OLDEST_SUPPORTED:
        build.to_stderr(f"Kubernetes 1.{started.minor} is older than what Bamboo supports: see docs/testing-cluster.md")
    try:
        Release(started, SYSTEM, folder).install()
    except (Missing, HelmError) as error:
        started.stop()
        _fail(str(error))


@app.command()
def down() -> None:
    """End the cluster and everything that runs on it."""
    folder = _folder()
    if not _running():
        _fail("no test cluster is running")
    os.kill(call(folder, "status")["processes"]["host"], signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.1)
    if folder.exists():
        _fail(f"{folder} is still there after {STOP_SECONDS} s")


@app.command()
def status() -> None:
    """Print the cluster's processes and nodes."""
    found = Cluster.attach(_folder() / "admin.kubeconfig").status() if _running() else None
    if found is None:
        print("no test cluster is running")
        return
    for name, pid in found["processes"].items():
        print(f"{name:24} pid {pid}")
    for name, mode in found["nodes"].items():
        print(f"{name:24} {mode}")
    if found["trouble"]:
        print(found["trouble"])
    print(f"export KUBECONFIG={_folder() / 'admin.kubeconfig'}")


@app.command()
def fail(node: Node) -> None:
    """Cut a node's power: kill all its processes at once, without notice. Its Node object remains."""
    _call("fail", node=node)


@app.command()
def delete(node: Node) -> None:
    """Remove a machine and its Node object, as when a cloud takes a spot node."""
    _call("delete", node=node)


@app.command()
def restore() -> None:
    """Bring back failed and deleted nodes, and reset the taints of all nodes."""
    _call("restore")


if __name__ == "__main__":
    app(prog_name="python -m cluster")
