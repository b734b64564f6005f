"""Jobs in a queue of Kueue, whose own manager admits their pods: one by one, and takes them away for others."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kueue_kit
from cluster.client import ApiError, Json
from cluster.handle import Cluster
from cluster.nodes import GPU
from operator_jobs import TOLERATE, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
GATED = "worker(s) are held back by scheduling gates: kueue.x-k8s.io/admission"
PATIENCE = 300.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of its own: Kueue's webhooks are asked for every pod, and end with these tests."""
    source = kueue_kit.given()
    if source is None:
        pytest.skip(f"{kueue_kit.GIVEN} names no folder with Kueue's manager and manifests")
    started = Cluster.start()
    try:
        with kueue_kit.kueue(started, source, tmp_path_factory.mktemp("kueue")):
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

    kueue_kit.set_quota(api, queue, 2)
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
            return kueue_kit.queue(cluster.api, namespace, 1)
        except ApiError as error:
            if "connection refused" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def until_used(cluster: Cluster, queue: str, gpus: int) -> None:
    def used(found: Json) -> bool:
        flavors = (found.get("status") or {}).get("flavorsReservation") or ()
        return sum(int(r["total"]) for flavor in flavors for r in flavor["resources"]) == gpus

    cluster.api.wait(f"/apis/{kueue_kit.API}/clusterqueues/{queue}", used)


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
