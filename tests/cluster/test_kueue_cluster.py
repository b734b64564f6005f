"""Jobs in a queue, whose pods Kueue admits one by one: a stand-in for it, or Kueue itself where there is one."""

import base64
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import trustme
import yaml

from bamboo_core.control.digests import add_digests
from cluster.client import ApiError, Client, Json
from cluster.control_plane import free_ports
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import GPU
from kueue_manager import CLASS, GROUP
from kueue_stand_in import StandIn
from operator_jobs import TOLERATE, digest_of_undisturbed, manifest, slowed, small
from operator_process import Job, Operator, condition

GIVEN = "BAMBOO_KUEUE"
SYSTEM = "kueue-system"
ACCOUNT = "kueue-controller-manager"
API = "kueue.x-k8s.io/v1beta2"
LEFT_OUT = ("APIService", "Deployment", "Service", "Secret", "ConfigMap")  # what needs pods and a network
STOP_SECONDS = 30
STEPS = 300
CLASSES = {"urgent": 1000, "usual": 100, "spare": 1}
# Where it looks for the certificate of its metrics cannot be chosen, so it gets an /etc of its own.
CERTIFICATES = "/etc/kueue/metrics/certs"
OWN_ETC = (
    f'mount -t tmpfs tmpfs /etc && mkdir -p {CERTIFICATES} && cp "$1"/tls.* {CERTIFICATES} && shift &&'
    ' exec setpriv --pdeathsig KILL -- "$@"'
)


def given() -> Path | None:
    """The folder, if there is one."""
    return Path(os.environ[GIVEN]) if os.environ.get(GIVEN) else None


@contextlib.contextmanager
def kueue(cluster: Cluster, source: Path, folder: Path) -> Iterator[None]:
    """It runs, and admits pods. The cluster has to end with it: its webhooks are asked for every pod."""
    port, health = free_ports(2)
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    mine.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    mine.private_key_pem.write_to_path(folder / "tls.key")
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()

    hooks = []
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    for one in filter(None, yaml.safe_load_all((source / "manifests.yaml").read_text())):
        _by_address(one, f"https://127.0.0.1:{port}", bundle)
        if one["kind"].endswith("WebhookConfiguration"):
            one["metadata"].pop("namespace", None)  # which such an object has not
            hooks.append(one)
        elif one["kind"] not in LEFT_OUT:
            _create(cluster.api, one)

    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(port, health, folder)))
    kubeconfig = cluster.service_account_kubeconfig(SYSTEM, ACCOUNT, folder / "kueue.kubeconfig")
    run = [str(source / "manager"), f"--config={config}", "--feature-gates=VisibilityOnDemand=false"]
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", OWN_ETC, "sh", str(folder), *run]
    with (folder / "kueue.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=log, stderr=log)
    try:
        for hook in hooks:
            _create(cluster.api, hook)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
        print((folder / "kueue.log").read_text()[-20_000:])


def _config(port: int, health: int, folder: Path) -> Json:
    """Processors and memory have no quota here."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["pod"]},
        "resources": {"excludeResourcePrefixes": ["cpu", "memory"]},
    }


def _by_address(manifest: Json, url: str, bundle: str) -> None:
    """Webhooks are at an address instead of a Service."""

    def changed(client: Json) -> Json:
        return {"url": url + client["service"]["path"], "caBundle": bundle}

    for hook in manifest.get("webhooks") or ():
        hook["clientConfig"] = changed(hook["clientConfig"])
    conversion: dict[str, Any] = (manifest.get("spec") or {}).get("conversion") or {}
    if "webhook" in conversion:
        conversion["webhook"]["clientConfig"] = changed(conversion["webhook"]["clientConfig"])


def _create(api: Client, manifest: Json) -> None:
    try:
        api.create(manifest)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise


class Queue(Protocol):
    """A queue in the test's namespace, whose quota counts workers. name: of its LocalQueue."""

    name: str

    def set_quota(self, workers: int) -> None: ...

    @property
    def used(self) -> int: ...


class StandInQueue:
    """Played."""

    name = "queue"

    def __init__(self, kueue: StandIn) -> None:
        self.kueue = kueue
        kueue.manager.classes = CLASSES

    def set_quota(self, workers: int) -> None:
        self.kueue.manager.quota = workers

    @property
    def used(self) -> int:
        return self.kueue.used


class KueueQueue:
    """Of Kueue itself: GPUs, of which each worker has one. Whoever is more important takes those of others."""

    def __init__(self, api: Client, namespace: str) -> None:
        self._api, self.name = api, f"queue-{namespace}"
        self._path = f"/apis/{API}/clusterqueues/{self.name}"
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                _create(api, {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}})
                break
            except ApiError as error:  # its webhooks take a while
                if "connection refused" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
        spec = {
            "namespaceSelector": {},
            "resourceGroups": _groups(0),
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        _create(api, {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": self.name}, "spec": spec})
        local = {"kind": "LocalQueue", "metadata": {"name": self.name}, "spec": {"clusterQueue": self.name}}
        api.create({"apiVersion": API, **local}, namespace)

    def set_quota(self, workers: int) -> None:
        self._api.patch(self._path, {"spec": {"resourceGroups": _groups(workers)}})

    @property
    def used(self) -> int:
        flavors = (self._api.get(self._path).get("status") or {}).get("flavorsReservation") or ()
        return sum(int(r["total"]) for flavor in flavors for r in flavor["resources"])


def _groups(gpus: int) -> list[Json]:
    flavor = {"name": "default", "resources": [{"name": GPU, "nominalQuota": gpus}]}
    return [{"coveredResources": [GPU], "flavors": [flavor]}]


pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PATIENCE = 120.0
NOTICES = 20
PREEMPTED = "WorkloadEvictedDueToPreempted"


@pytest.fixture(scope="module")
def queues(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kueue runs, if it is there. Its webhooks go with the tests of this file."""
    if (source := given()) is None:
        yield
        return
    with kueue(installed, source, tmp_path_factory.mktemp("kueue")):
        for name, value in CLASSES.items():
            named = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
            installed.api.create(named)
        yield


@pytest.fixture
def queue(queues: None, installed: Cluster, namespace: str, tmp_path: Path) -> Iterator[Queue]:
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("pods of this API server have no scheduling gates")
    if given() is not None:
        yield KueueQueue(installed.api, namespace)
        return
    with StandIn(installed.api, namespace, tmp_path) as played:
        yield StandInQueue(played)


@pytest.fixture
def played(queue: Queue) -> StandIn:
    if not isinstance(queue, StandInQueue):
        pytest.skip("Kueue itself cannot be told to do this")
    return queue.kueue


def test_each_worker_waits_for_quota_and_leaves_when_it_is_preempted(
    installed: Cluster, namespace: str, queue: Queue, operator: Operator
) -> None:
    """A pod at the gate that its user deletes is made anew. What is taken costs no failure, and comes back."""
    queue.set_quota(1)
    job = Job(installed.api, namespace, small("queued", queue={"name": queue.name}, backoffLimit=0))
    status = job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "WaitingForQuota")
    assert f"wait for quota in Kueue's queue {queue.name}" in condition(status, "WorkersReady")["message"]
    job.told("WaitingForQuota")
    pods = job.until_pods(lambda found: len(gated(found)) == 1 and len(found) == 2)
    (waiting,) = gated(pods)
    installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{waiting}")
    pods = job.until_pods(lambda found: len(found) == 2 and waiting not in found)
    assert "queued-w2" in pods

    queue.set_quota(2)
    whole(job)
    victim = owners(job.status())[0]
    installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{victim}")
    job.wait(lambda s: victim not in owners(s))
    whole(job)
    assert queue.used == 2

    with outsiders(installed.api, namespace, queue, 1):
        job.told(PREEMPTED)
        job.until("Degraded")
        job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "WaitingForQuota")
        job.step(job.status()["training"]["step"] + 2)
    assert whole(job)["preemptions"] == 2
    assert job.status()["restarts"] == 0
    job.delete()
    job.until_gone()
    until_used(queue, 0)


@pytest.mark.slow
def test_two_jobs_share_a_quota_for_one_and_a_half(
    installed: Cluster, namespace: str, queue: Queue, operator: Operator, tmp_path: Path
) -> None:
    """The second is more important; the first loses a pipeline for it, and gets it again. Twenty notices later both
    train the same bits as undisturbed.
    """
    queue.set_quota(6)
    growing = {"name": queue.name, "priorityClass": "usual", "growthPriorityClass": "spare"}
    first_document, first_slow = paced_job("first", tmp_path, {"minWorkers": 2}, growing)
    first = Job(installed.api, namespace, first_document)
    grown(first, 2)
    important = {"name": queue.name, "priorityClass": "urgent"}
    second_document, second_slow = paced_job("second", tmp_path, {"minWorkers": 4}, important)
    second = Job(installed.api, namespace, second_document)
    grown(second, 2)
    grown(first, 1)
    until_used(queue, 6)
    first.told(PREEMPTED)

    for number in range(NOTICES):
        job, pipelines = ((second, 2), (first, 1))[number % 2]
        victim = owners(job.status())[number % 2]
        installed.api.delete(f"/api/v1/namespaces/{namespace}/pods/{victim}")
        job.wait(lambda s, gone=victim: gone not in owners(s))
        grown(job, pipelines)
    assert not {"QuotaGivenBack", "Restoring"} & {reason for reason, _ in first.events()}, "it has trained on"

    second_slow.unlink()
    status = second.until("Complete")
    assert add_digests(status["digests"]) == digest_of_undisturbed(second_document)
    grown(first, 2)
    first_slow.unlink()
    status = first.until("Complete")
    assert add_digests(status["digests"]) == digest_of_undisturbed(first_document)
    until_used(queue, 0)


def paced_job(name: str, folder: Path, elastic: Json, queue: Json) -> tuple[Json, Path]:
    """A job of two pipelines, and the file as long as which is there its steps take a second."""
    (folder / name).mkdir()
    elastic = {**elastic, "maxWorkers": 4, "stabilizationSeconds": 5}
    asked = {"topology": {"stages": 2}, "elastic": elastic, "queue": queue}
    return slowed(manifest(name, steps=STEPS, standby=0, **asked), folder / name)


def grown(job: Job, pipelines: int) -> None:
    """Waits until the job trains with so many pipelines, each of two workers of its own."""

    def trains(status: Json) -> bool:
        rows = json.loads(status.get("plan") or "{}").get("pipelines") or ()
        return len(rows) == pipelines and len({worker for row in rows for worker in row}) == 2 * pipelines

    job.wait(trains)


def owners(status: Json) -> list[str]:
    rows: list[list[str]] = json.loads(status["plan"])["pipelines"]
    return [worker for row in rows for worker in row]


def gated(pods: Mapping[str, Json]) -> dict[str, Json]:
    return {name: pod for name, pod in pods.items() if pod["spec"].get("schedulingGates")}


def whole(job: Job) -> Json:
    return job.wait(lambda s: s["state"] == "Running" and condition(s, "WorkersReady")["status"] == "True")


def until_used(queue: Queue, workers: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while queue.used != workers:
        assert time.monotonic() < deadline, f"{queue.used} workers hold quota, not {workers}"
        time.sleep(0.2)


@contextmanager
def outsiders(api: Client, namespace: str, queue: Queue, number: int) -> Iterator[None]:
    """Pods that are more important, and not Bamboo's."""
    names = [f"outsider-{n}" for n in range(number)]
    for name in names:
        container = {"name": "one", "image": "x", "command": ["sleep", "600"], "resources": {"limits": {GPU: "1"}}}
        spec = {"tolerations": TOLERATE, "containers": [container], "restartPolicy": "Never"}
        labels = {f"{GROUP}/queue-name": queue.name, CLASS: "urgent"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        api.create(pod, namespace)
    try:
        yield
    finally:
        for name in names:
            api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", 0)
