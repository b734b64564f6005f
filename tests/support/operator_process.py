"""The real operator as a process with its own ServiceAccount, and the objects that it needs."""

import contextlib
import copy
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from certificates import issue, trusting
from cluster.client import ApiError, Client, Json
from cluster.control_plane import free_ports
from cluster.handle import OLDEST_SUPPORTED, Cluster
from crd_kit import STATUS_VALIDATOR, strip_rules
from waiting import until

ROOT = Path(__file__).parents[2]
SYSTEM = "bamboo-system"
LEASE = "bamboo-operator"
STOP_SECONDS = 60
PATIENCE = 300.0  # for a job on a slow machine
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/bamboojobs.bamboo.dev"
JOBS = "/apis/bamboo.dev/v1alpha1/namespaces/{}/bamboojobs"


def install(cluster: Cluster) -> None:
    """Create the CRD (without CEL rules on an old server), namespace and rights if missing; wait for the CRD."""
    crd = yaml.safe_load((ROOT / "crds" / "bamboojob.yaml").read_text())
    if cluster.minor < OLDEST_SUPPORTED:
        strip_rules(crd)
    for manifest in (
        crd,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}},
        *yaml.safe_load_all((ROOT / "operator/rbac.yaml").read_text()),
    ):
        try:
            cluster.api.create(manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
    cluster.api.wait(
        CRD,
        lambda found: any(
            c["type"] == "Established" and c["status"] == "True"
            for c in (found.get("status") or {}).get("conditions") or ()
        ),
    )


def allow_lease(cluster: Cluster, namespace: str) -> None:
    """Give the operator the rights of its Role (on Leases and pods) in a namespace. Each test uses its own namespace,
    so that the operators of two tests do not exclude each other.
    """
    for manifest in yaml.safe_load_all((ROOT / "operator/rbac.yaml").read_text()):
        if manifest["kind"] in ("Role", "RoleBinding"):
            manifest["metadata"]["namespace"] = namespace
            cluster.api.create(manifest)


def stand_in(cluster: Cluster, namespace: str, name: str) -> str:
    """Create a pod that no node runs, in place of the operator's pod, and return its path."""
    container = {"name": "operator", "image": "x", "command": ["sleep", "1000"]}
    spec = {"schedulerName": "nobody", "containers": [container]}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


class Operator:
    """An operator process, which the constructor starts. kill() and start() simulate a crash or an upgrade: the key and
    the address stay the same.

    Its Lease is in the namespace that it watches; an operator made by another() waits for that Lease.
    """

    identity = "operator"

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._folder = folder
        self._namespace = namespace
        allow_lease(cluster, namespace)
        self._kubeconfig = cluster.service_account_kubeconfig(SYSTEM, "bamboo-operator", folder / "operator.kubeconfig")
        (folder / "key").write_bytes(secrets.token_bytes(32))
        self._tls = issue(folder)
        self.trusting = trusting(folder)
        self.port, self.web_port = free_ports(2)
        self.log = folder / "operator.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def another(self, identity: str) -> "Operator":
        """Return a second operator, not started, like a Deployment's second pod: same key, workers' port and Lease."""
        other = copy.copy(self)
        other.identity, other.process = identity, None
        other.log = self._folder / f"{identity}.log"
        (other.web_port,) = free_ports(1)
        return other

    def start(self) -> None:
        arguments = ["--listen", f"127.0.0.1:{self.port}", "--web-listen", f"127.0.0.1:{self.web_port}"]
        arguments += ["--namespace", self._namespace, "--key-file", str(self._folder / "key"), *self._tls]
        arguments += ["--lease", f"{self._namespace}/{LEASE}", "--identity", self.identity]
        command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-P", "-m", "bamboo_operator", *arguments]
        env = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()

    @property
    def ports(self) -> set[int]:
        """The ports on which the operator listens."""
        assert self.process is not None
        held = set()
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                held.add(os.readlink(entry))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def said(self) -> str:
        return self.log.read_text()

    def check(self) -> None:
        """Check that the operator's log has no traceback and no failure."""
        assert "Traceback" not in self.said, f"the operator's log has a traceback:\n{self.said}"
        assert "the operator failed" not in self.said


class Job:
    """A BambooJob on the cluster, which the constructor creates. All calls use the API, as a user does."""

    def __init__(self, api: Client, namespace: str, manifest: Mapping[str, Any]) -> None:
        self.api, self.namespace, self.name = api, namespace, str(manifest["metadata"]["name"])
        self.path = f"{JOBS.format(namespace)}/{self.name}"
        api.request("POST", JOBS.format(namespace), manifest)

    def wait(self, condition: Callable[[Json], Any], seconds: float = PATIENCE) -> Json:
        """Wait until the condition holds for the job's status, and return that status. Validate each status seen."""
        found = self.api.wait(self.path, lambda job: job.get("status") and condition(_valid(job["status"])), seconds)
        status: Json = found["status"]
        return status

    def until_gone(self, seconds: float = PATIENCE) -> None:
        """Wait until the job and its pods are deleted."""
        self.api.wait(self.path, lambda job: not job, seconds)
        self.until_pods(lambda pods: not pods, seconds)

    def until_pods(self, condition: Callable[[dict[str, Json]], Any], seconds: float = PATIENCE) -> dict[str, Json]:
        """Wait until the condition holds for the job's pods, and return them."""
        return until(
            lambda: (pods,) if condition(pods := self.pods()) else (),
            seconds,
            lambda: {name: pod["status"] for name, pod in self.pods().items()},
        )[0]

    def until(self, kind: str, value: str = "True", seconds: float = PATIENCE) -> Json:
        """Wait until a condition has this value, and return the status. kind: the condition's type."""
        return self.wait(lambda status: condition(status, kind).get("status") == value, seconds)

    def step(self, number: int, seconds: float = PATIENCE) -> Json:
        return self.wait(lambda status: (status.get("training") or {}).get("step", 0) >= number, seconds)

    def status(self) -> Json:
        found: Json = self.api.get(self.path).get("status") or {}
        return _valid(found)

    def events(self) -> list[tuple[str, str]]:
        """Return (reason, message) of the job's events, oldest first."""
        items = self.api.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        own = [
            e
            for e in items
            if e["involvedObject"].get("name") == self.name and e["involvedObject"]["kind"] == "BambooJob"
        ]
        own.sort(key=lambda e: int(e["metadata"]["resourceVersion"]))
        return [(e["reason"], e["message"]) for e in own]

    def told(self, reason: str, seconds: float = PATIENCE) -> str:
        """Wait for an event with this reason, and return its message."""
        return until(lambda: [text for found, text in self.events() if found == reason], seconds, self.events)[0]

    def pods(self) -> dict[str, Json]:
        items = self.api.get(
            f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"bamboo.dev/job-name={self.name}"
        )
        return {pod["metadata"]["name"]: pod for pod in items["items"]}

    def edit(self, spec: Json) -> None:
        self.api.patch(self.path, {"spec": spec})

    def delete(self) -> None:
        self.api.delete(self.path)


def _valid(status: Json) -> Json:
    """Validate the status against the CRD's schema, and return the status."""
    wrong = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in STATUS_VALIDATOR.iter_errors(status)
    ]
    assert not wrong, wrong
    return status


def owners(status: Json) -> list[str]:
    """Return the owners of the first pipeline's stages, in order, from the plan in the job's status."""
    row: list[str] = json.loads(status["plan"])["pipelines"][0]
    return row


def condition(status: Json, kind: str) -> Json:
    return next((c for c in status.get("conditions") or () if c["type"] == kind), {})


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    if cluster.folder is None:
        pytest.skip("this operator is a process of this machine, which a real cluster's pods do not reach")
    install(cluster)
    return cluster


@pytest.fixture
def operator(installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[Operator]:
    running = Operator(installed, namespace, tmp_path)
    try:
        yield running
    finally:
        running.kill()
        print(running.said)
    running.check()
