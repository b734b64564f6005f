"""What Kubernetes itself holds back, refuses and takes away: gates, Pod Security, budgets, evictions, preemptions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bamboo_operator.kube.objects import api_time, utc_now
from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import GPU
from eviction_kit import eviction
from operator_jobs import TOLERATE, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RESPONDER = "bamboo.dev/operator"
NAMES_RESPONDERS = 37  # the minor version of Kubernetes since which pods may
GATE = "test.dev/budget"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def whole(job: Job) -> Json:
    return job.wait(lambda s: s["state"] == "Running" and condition(s, "WorkersReady")["status"] == "True")


def owners(job: Job) -> dict[str, str]:
    """The nodes of the workers that train, by the workers' names."""
    plan = job.status()["plan"]
    return {name: pod["spec"]["nodeName"] for name, pod in job.pods().items() if name in plan}


def test_what_kubernetes_holds_back_refuses_and_takes_away(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    """What it takes away is no fault of the worker: it is named as the pod's condition DisruptionTarget names it, and
    taken over in time.
    """
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("the API server is older than what Bamboo supports")
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    installed.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    refused = Job(installed.api, namespace, privileged("refused"))
    assert 'violates PodSecurity "restricted' in refused.told("PodsRefused")
    assert refused.pods() == {}
    refused.delete()

    job = Job(installed.api, namespace, gated("moving"))
    status = job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "Gated")
    assert f"worker(s) are held back by scheduling gates: {GATE}" in condition(status, "WorkersReady")["message"]
    held = job.until_pods(lambda pods: len(pods) == 3)
    ungate(job)
    whole(job)
    assert job.pods().keys() == held.keys()

    victim, other = owners(job)
    until_one_may_go(installed, namespace)
    evict(installed, namespace, victim)
    with pytest.raises(ApiError, match=r"429 .*disruption budget"):
        evict(installed, namespace, other)
    left(job, [victim], "EvictionByEvictionAPI", 1)
    until_one_may_go(installed, namespace)

    node = next(iter(owners(job).values()))
    victims = [name for name, pod in job.pods().items() if pod["spec"].get("nodeName") == node]
    installed.taint(node, "test.dev/maintenance")
    left(job, victims, "DeletionByTaintManager", 1 + len(victims))
    installed.untaint(node, "test.dev/maintenance")

    before, node = job.status()["preemptions"], next(iter(owners(job).values()))
    victims = [name for name, pod in job.pods().items() if pod["spec"].get("nodeName") == node]
    with more_important(installed, namespace, node):
        left(job, victims, "PreemptionByScheduler", before + len(victims))


class Answering(Operator):
    more = ("--eviction-requests",)


def test_an_eviction_that_is_requested_waits_for_a_planned_takeover(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Kubernetes 1.37 would make the Eviction of an EvictionRequest; here the test plays that controller."""
    if OLDEST_SUPPORTED <= installed.minor < NAMES_RESPONDERS:
        pytest.skip("this API server refuses pods that name responders")
    serve_evictions(installed)
    running = Answering(installed, namespace, tmp_path)
    try:
        job = Job(installed.api, namespace, small("moving", standby=1))
        whole(job)
        victim = next(iter(owners(job)))
        asked = request_eviction(job, victim)
        asked("heartbeatTime")  # its message may be the last one already
        left(job, [victim], "EvictionRequest", 1)
        assert asked("completionTime")["message"] == "the worker has left"
    finally:
        running.kill()
        print(running.said)
    running.check()


def serve_evictions(cluster: Cluster) -> None:
    """The kind Eviction in the fields that responders use, for an API server that has none of its own."""
    strings = {"type": "string"}
    responder = {"name": strings, "priority": {"type": "integer"}, "state": strings, "message": strings}
    times = ("startTime", "heartbeatTime", "expectedCompletionTime", "completionTime")
    responder |= {time: {"type": "string", "format": "date-time"} for time in times}
    by_name = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    listed = {**by_name, "items": {"type": "object", "required": ["name"], "properties": responder}}
    requesters = {"type": "array", "items": {"type": "object", "properties": {"name": strings, "intent": strings}}}
    said = {"requesters": requesters, "targetResponders": listed, "responders": listed}
    pod = {"type": "object", "properties": {"name": strings, "uid": strings}}
    spec = {"type": "object", "properties": {"target": {"type": "object", "properties": {"pod": pod}}}}
    schema = {"type": "object", "properties": {"spec": spec, "status": {"type": "object", "properties": said}}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "subresources": {"status": {}}}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "evictions.lifecycle.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": "lifecycle.k8s.io",
            "names": {"kind": "Eviction", "plural": "evictions"},
            "scope": "Namespaced",
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    cluster.api.create(crd)
    cluster.api.wait(
        "/apis/lifecycle.k8s.io/v1alpha1",
        lambda found: any(one["name"] == "evictions" for one in found.get("resources", ())),
    )


def request_eviction(job: Job, worker: str) -> Callable[[str], Json]:
    """Makes it the operator's turn to see to that worker's eviction. What is returned waits until the operator's
    answer has a field, and returns it.
    """
    path, name = f"/apis/lifecycle.k8s.io/v1alpha1/namespaces/{job.namespace}/evictions", f"pod-1-{worker}"
    pod = job.pods()[worker]
    if "evictionResponders" in pod["spec"]:  # an older API server leaves the field out
        assert pod["spec"]["evictionResponders"][0]["name"] == RESPONDER
    body = eviction(pod=worker, pod_uid=pod["metadata"]["uid"], started=api_time(utc_now()))
    metadata = {"name": name, "labels": {RESPONDER: "responder"}}
    kind = {"apiVersion": "lifecycle.k8s.io/v1alpha1", "kind": "Eviction"}
    job.api.request("POST", path, {**kind, "metadata": metadata, "spec": body["spec"]})
    job.api.patch(f"{path}/{name}/status", {"status": body["status"]})

    def answered(field: str) -> Json:
        found = job.api.wait(f"{path}/{name}", lambda one: one["status"]["responders"][0].get(field))
        answer: Json = found["status"]["responders"][0]
        return answer

    return answered


def privileged(name: str) -> Json:
    document = small(name)
    container = {"name": "trainer", "securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}
    document["spec"]["worker"]["template"]["spec"]["containers"] = [container]
    return document


def gated(name: str) -> Json:
    document = small(name, standby=1)
    document["spec"]["worker"]["template"]["spec"]["schedulingGates"] = [{"name": GATE}]
    return document


def until_one_may_go(cluster: Cluster, namespace: str) -> None:
    """By the budget that the operator makes for the namespace's only job."""
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"

    def allowed(found: Json) -> list[int]:
        return [(one.get("status") or {}).get("disruptionsAllowed", 0) for one in found["items"]]

    cluster.api.wait(budgets, lambda found: allowed(found) == [1])


@contextmanager
def more_important(cluster: Cluster, namespace: str, node: str) -> Iterator[None]:
    """A pod that wants all GPUs of that node, and may push others out."""
    name = f"important-{namespace}"
    cluster.api.request("POST", PRIORITIES, {"metadata": {"name": name}, "value": 1000})
    container = {"image": "x", "command": ["sleep", "1000"], "resources": {"limits": {GPU: "8"}}}
    spec = {
        "priorityClassName": name,
        "tolerations": TOLERATE,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [{"name": "all", **container, "securityContext": SECURITY}],
    }
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "all"}, "spec": spec}, namespace)
    try:
        yield
    finally:
        cluster.api.delete(f"{PRIORITIES}/{name}")


def evict(cluster: Cluster, namespace: str, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)


def ungate(job: Job) -> None:
    """Its new pods may be scheduled."""
    for name, pod in job.pods().items():
        if pod["spec"].get("schedulingGates"):
            job.api.patch(f"/api/v1/namespaces/{job.namespace}/pods/{name}", {"spec": {"schedulingGates": None}})


def joined(job: Job) -> set[str]:
    """All workers that ever have."""
    return {message.split()[0] for reason, message in job.events() if reason == "WorkerJoined"}


def left(job: Job, workers: list[str], reason: str, preemptions: int) -> None:
    """They were told so, and the job is whole again without them."""
    assert job.told(reason).startswith(tuple(f"{worker}: " for worker in workers))
    job.until_pods(lambda pods: not pods.keys() & set(workers) and len(pods) == 3)
    ungate(job)
    job.wait(lambda s: not any(worker in s["plan"] for worker in workers))
    job.wait(lambda _: job.pods().keys() <= joined(job))  # the condition may be from before they left
    assert whole(job)["preemptions"] == preemptions
    assert "Takeover" not in [pair[0] for pair in job.events()], f"a notice was of no use: {job.events()}"
