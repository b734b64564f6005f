"""Jobs in a queue of Kueue, whose own manager admits their pods: one by one, and takes them away for others."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from cluster.client import ApiError, Client, Json
from cluster.handle import Cluster
from cluster.nodes import GPU
from operator_jobs import TOLERATE, small
from operator_process import Job, Operator, condition

GIVEN = "BAMBOO_KUEUE"
SYSTEM = "kueue-system"
ACCOUNT = "kueue-controller-manager"
API = "kueue.x-k8s.io/v1beta2"
LEFT_OUT = ("APIService", "Deployment", "Service", "Secret", "ConfigMap")  # what needs pods and a network
STOP_SECONDS = 30
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
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, health = int(free.getsockname()[1]), int(other.getsockname()[1])
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    mine.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    mine.private_key_pem.write_to_path(folder / "tls.key")
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()

    hooks = []
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    for manifest in filter(None, yaml.safe_load_all((source / "manifests.yaml").read_text())):
        _by_address(manifest, f"https://127.0.0.1:{port}", bundle)
        if manifest["kind"].endswith("WebhookConfiguration"):
            manifest["metadata"].pop("namespace", None)  # which such an object has not
            hooks.append(manifest)
        elif manifest["kind"] not in LEFT_OUT:
            _create(cluster.api, manifest)

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
    """Plain pods only. Processors and memory have no quota here."""
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


def make_queue(api: Client, namespace: str, gpus: int) -> str:
    """A queue of that namespace with a quota of so many GPUs; its name, which the ClusterQueue has, too.

    Whoever is more important takes the GPUs of others.
    """
    name = f"queue-{namespace}"
    _create(api, {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}})
    flavor = {"name": "default", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": [flavor]}],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    _create(api, {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec})
    local = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": name}}
    api.create(local, namespace)
    return name


def set_quota(api: Client, name: str, gpus: int) -> None:
    flavor = {"name": "default", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]}
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [flavor]}]
    api.patch(f"/apis/{API}/clusterqueues/{name}", {"spec": {"resourceGroups": groups}})


pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
GATED = "worker(s) are held back by scheduling gates: kueue.x-k8s.io/admission"
PATIENCE = 300.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of its own: Kueue's webhooks are asked for every pod, and end with these tests."""
    source = given()
    if source is None:
        pytest.skip(f"{GIVEN} names no folder with Kueue's manager and manifests")
    started = Cluster.start()
    try:
        with kueue(started, source, tmp_path_factory.mktemp("kueue")):
            yield started
    finally:
        started.stop()


def test_a_queue_admits_workers_and_takes_them_away(installed: Cluster, namespace: str, operator: Operator) -> None:
    """With a quota for one of two workers, that one waits for the other. What is taken away has notice, and its quota
    is free; so is that of a suspended job.
    """
    api = installed.api
    queue = admitting(installed, namespace)
    job = Job(api, namespace, small("queued", queue={"name": queue}))
    job.wait(lambda s: f"1 {GATED}" in condition(s, "WorkersReady").get("message", ""))
    job.until_pods(lambda pods: sorted(bool(p["spec"].get("schedulingGates")) for p in pods.values()) == [False, True])

    set_quota(api, queue, 2)
    victim = owners(whole(job))[0]
    installed.signal(namespace, victim, 9)
    job.wait(lambda s: victim not in owners(s))
    assert whole(job)["preemptions"] == 1, "a replacement is admitted with the lost worker's quota"

    with more_important(installed, namespace, queue):
        assert job.told("PodDeleted").endswith("is being deleted")
        job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "Gated")
        job.told("PlannedTakeover")
    assert whole(job)["preemptions"] == 2
    assert sum(reason == "Takeover" for reason, _ in job.events()) == 1, f"a notice was of no use: {job.events()}"

    job.edit({"suspend": True})
    job.until_pods(lambda pods: not pods)
    until_used(installed, queue, 0)
    job.edit({"suspend": False})
    whole(job)
    until_used(installed, queue, 2)
    job.delete()
    job.until_gone()
    until_used(installed, queue, 0)


def owners(status: Json) -> list[str]:
    found: list[str] = json.loads(status["plan"])["pipelines"][0]
    return found


def whole(job: Job) -> Json:
    return job.wait(lambda s: s["state"] == "Running" and condition(s, "WorkersReady")["status"] == "True")


def admitting(cluster: Cluster, namespace: str) -> str:
    """A queue with a quota of one GPU, as soon as Kueue answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return make_queue(cluster.api, namespace, 1)
        except ApiError as error:
            if "connection refused" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def until_used(cluster: Cluster, queue: str, gpus: int) -> None:
    def used(found: Json) -> bool:
        flavors = (found.get("status") or {}).get("flavorsReservation") or ()
        return sum(int(r["total"]) for flavor in flavors for r in flavor["resources"]) == gpus

    cluster.api.wait(f"/apis/{API}/clusterqueues/{queue}", used)


@contextmanager
def more_important(cluster: Cluster, namespace: str, queue: str) -> Iterator[None]:
    """A pod that wants one of the queue's GPUs, and may take it from others."""
    name = f"important-{namespace}"
    cluster.api.request("POST", PRIORITIES, {"metadata": {"name": name}, "value": 1000})
    container = {"name": "one", "image": "x", "command": ["sleep", "1000"], "resources": {"limits": {GPU: "1"}}}
    spec = {"priorityClassName": name, "tolerations": TOLERATE, "containers": [container]}
    metadata = {"name": "important", "labels": {"kueue.x-k8s.io/queue-name": queue}}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace)
    try:
        yield
    finally:
        cluster.api.delete(f"/api/v1/namespaces/{namespace}/pods/important", 0)
        cluster.api.delete(f"{PRIORITIES}/{name}")
