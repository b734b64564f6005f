"""A test's handle of a cluster: its API, and methods that disturb it."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from cluster import build, kubeconfig
from cluster.children import tail
from cluster.client import Client, Json
from cluster.nodes import NodeSpec, usual_nodes

OLDEST_SUPPORTED = 29  # minor version of Kubernetes that Bamboo supports; the one that is built here is older
STOP_SECONDS = 30
CONTROL_SECONDS = 120


class NotOffered(Exception):
    """Raised if a method that only the test cluster offers is called for another cluster, such as kind."""


class ControlFailed(Exception):
    """Raised if the test cluster refuses a command, or fails to run it."""


class Cluster:
    """A cluster. path: its kubeconfig. folder: a test cluster's, else None. process: its host if started here."""

    def __init__(self, path: Path, folder: Path | None = None, process: "subprocess.Popen[str] | None" = None) -> None:
        self.kubeconfig, self.folder, self.api = path, folder, Client(path)
        self._process = process

    @classmethod
    def start(
        cls,
        *,
        nodes: Sequence[NodeSpec] | None = None,
        folder: Path | None = None,
        owned: bool = True,
    ) -> Self:
        """Start a cluster whose pods are processes. nodes: by default usual_nodes(). owned: end it with this process.

        Raises build.Unavailable or build.Broken, or RuntimeError if the cluster does not start.
        """
        config = {
            "programs": str(build.binaries()),
            "nodes": [spec.to_json() for spec in (usual_nodes() if nodes is None else nodes)],
            "real": None,
        }
        return cls._start(config, folder, owned)

    @classmethod
    def start_real(
        cls,
        *,
        nodes: Sequence[NodeSpec],
        archives: Sequence[Path] = (),
    ) -> Self:
        """Start a cluster with real nodes; each imports the archives' images when it boots. Raises as `start` does."""
        node = build.node_programs()
        folder = Path(tempfile.mkdtemp(prefix="bamboo-cluster-"))
        for path in map(Path.resolve, (folder, Path(sys.executable), Path(__file__))):
            if path.is_relative_to("/var") or path.is_relative_to("/run"):
                raise build.Unavailable(f"real nodes have a /var and a /run of their own, and so cannot see {path}")
        config = {
            "programs": str(build.binaries()),
            "nodes": [spec.to_json() for spec in nodes],
            "real": {
                "kubelet": str(node.kubelet),
                "root": str(node.root),
                "archives": [str(archive.absolute()) for archive in archives],
            },
        }
        return cls._start(config, folder, owned=True)

    @classmethod
    def _start(cls, config: Json, folder: Path | None, owned: bool) -> Self:
        folder = folder or Path(tempfile.mkdtemp(prefix="bamboo-cluster-"))
        config = {**config, "owner": os.getpid() if owned else None}
        (folder / "config.json").write_text(json.dumps(config))
        errors_log = folder / "host-errors.log"
        modules = [Path(__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
        with errors_log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster.host", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, modules))},
            )
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline() or "{}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if "ready" not in told:
            process.wait()
            reason = told.get("error") or tail(errors_log) or "its host process was ended"
            shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(f"the test cluster did not start: {reason}")
        build.to_stderr(f"ready after {told['ready']} s in {folder}")
        return cls(folder / "admin.kubeconfig", folder, process)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Return a handle of a kubeconfig's cluster. For a running test cluster all methods but `stop` work."""
        own = (path.parent / "control").is_socket()
        return cls(path, path.parent if own else None)

    def stop(self) -> None:
        """End every process and remove the folder. Only for the handle that started the cluster."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # Offered by every cluster.

    @functools.cached_property
    def minor(self) -> int:
        """The cluster's minor version of Kubernetes: 36 for 1.36."""
        return int(self.api.get("/version")["minor"].rstrip("+"))

    def taint(self, node: str, key: str, value: str = "", effect: str = "NoExecute") -> None:
        others = [t for t in self._taints(node) if (t["key"], t["effect"]) != (key, effect)]
        self._set_taints(node, [*others, {"key": key, "value": value, "effect": effect}])

    def untaint(self, node: str, key: str) -> None:
        self._set_taints(node, [taint for taint in self._taints(node) if taint["key"] != key])

    def delete(self, node: str) -> None:
        """Delete the Node object; the test cluster also removes its machine, without notice."""
        if self.folder:
            self._call("delete", node=node)
        else:
            self.api.delete(f"/api/v1/nodes/{node}")

    def logs(self, namespace: str, pod: str) -> str:
        """Return the output of a pod that has one container."""
        if self.folder:
            text: str = self._call("log", namespace=namespace, pod=pod)
            return text
        return self.api.text("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log")

    def service_account_kubeconfig(self, namespace: str, name: str, path: Path, seconds: int = 3600) -> Path:
        """Write a kubeconfig with a ServiceAccount's token to `path`; return `path`. seconds: requested lifetime."""
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
        answer = self.api.request("POST", f"{account}/token", {"spec": {"expirationSeconds": seconds}})
        cluster, _ = kubeconfig.parts(self.kubeconfig)
        ca, token = kubeconfig.authority(self.kubeconfig), {"token": answer["status"]["token"]}
        return kubeconfig.write(path, server=cluster["server"], ca=ca, user=token, namespace=namespace)

    # Offered by the test cluster only.

    def add(self, node: NodeSpec) -> None:
        self._call("add", spec=node.to_json())

    def fail(self, node: str) -> None:
        """Cut the power of a machine: all its processes are killed, and the API server hears nothing."""
        self._call("fail", node=node)

    def restore(self) -> None:
        """Restore the nodes with which the cluster started, replacing failed ones, and delete all other nodes."""
        self._call("restore")

    def signal(self, namespace: str, pod: str, number: int) -> None:
        """Send a signal to the pod's processes. Raises ControlFailed if the pod is unknown or the nodes are real."""
        self._call("signal", namespace=namespace, pod=pod, number=int(number))

    @contextlib.contextmanager
    def without(self, component: str = "kube-apiserver") -> Iterator[None]:
        """Keep a component of the control plane down during the block."""
        self._call("take_down", component=component)
        try:
            yield
        finally:
            self._call("bring_up", component=component)

    def status(self) -> Json:
        status: Json = self._call("status")
        return status

    def tails(self) -> str:
        """Return the ends of the logs of the test cluster's host and components; "" for other clusters."""
        logs = sorted(self.folder.glob("*.log")) if self.folder else []
        return "\n".join(f"--- {log.name}\n{tail(log)}" for log in logs)

    def _taints(self, node: str) -> list[dict[str, str]]:
        taints: list[dict[str, str]] = self.api.get(f"/api/v1/nodes/{node}")["spec"].get("taints", [])
        return taints

    def _set_taints(self, node: str, taints: list[dict[str, str]]) -> None:
        self.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": taints}})

    def _call(self, name: str, **arguments: Any) -> Any:
        if self.folder is None:
            raise NotOffered(f"only the test cluster can do this to a node or pod: {name}")
        return call(self.folder, name, **arguments)


def call(folder: Path, name: str, **arguments: Any) -> Any:
    """Send a command to the host process, and return the result. Raises ControlFailed, OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONTROL_SECONDS)
        connection.connect(str(folder / "control"))
        connection.sendall(json.dumps({"call": name, **arguments}).encode() + b"\n")
        with connection.makefile() as answers:
            answer = json.loads(answers.readline())
    if "error" in answer:
        raise ControlFailed(answer["error"])
    return answer["result"]
