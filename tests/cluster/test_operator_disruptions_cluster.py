"""Pods that Kubernetes holds back, refuses or removes: gates, Pod Security, budgets, evictions, taints, preemptions."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import GPU
from operator_jobs import TOLERATE, small
from operator_process import Job, Operator, condition, owners

pytest_plugins = ["cluster_kit", "operator_process"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

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


def test_what_kubernetes_holds_back_refuses_and_takes_away(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    """A pod that Kubernetes takes away counts as one preemption. An event gives the reason of its DisruptionTarget
    condition, and another worker takes over its stage before the pod ends.
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

    victim, other = owners(job.status())
    until_one_may_go(installed, namespace)
    evict(installed, namespace, victim)
    with pytest.raises(ApiError, match=r"429 .*disruption budget"):
        evict(installed, namespace, other)
    left(job, [victim], "EvictionByEvictionAPI", 1)
    until_one_may_go(installed, namespace)

    node = job.pods()[owners(job.status())[0]]["spec"]["nodeName"]
    victims = [name for name, pod in job.pods().items() if pod["spec"].get("nodeName") == node]
    installed.taint(node, "test.dev/maintenance")
    left(job, victims, "DeletionByTaintManager", 1 + len(victims))
    installed.untaint(node, "test.dev/maintenance")

    status = job.status()
    before, node = status["preemptions"], job.pods()[owners(status)[0]]["spec"]["nodeName"]
    victims = [name for name, pod in job.pods().items() if pod["spec"].get("nodeName") == node]
    with more_important(installed, namespace, node):
        left(job, victims, "PreemptionByScheduler", before + len(victims))


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
    """Wait until the budget of the namespace's only job allows one disruption."""
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"

    def allowed(found: Json) -> list[int]:
        return [(one.get("status") or {}).get("disruptionsAllowed", 0) for one in found["items"]]

    cluster.api.wait(budgets, lambda found: allowed(found) == [1])


@contextmanager
def more_important(cluster: Cluster, namespace: str, node: str) -> Iterator[None]:
    """Create a pod that needs all GPUs of the node and may preempt others. Delete its PriorityClass after the block."""
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
    """Remove the scheduling gates of the job's pods."""
    for name, pod in job.pods().items():
        if pod["spec"].get("schedulingGates"):
            job.api.patch(f"/api/v1/namespaces/{job.namespace}/pods/{name}", {"spec": {"schedulingGates": None}})


def joined(job: Job) -> set[str]:
    """Return the workers that have ever joined, according to the job's events."""
    return {message.split()[0] for reason, message in job.events() if reason == "WorkerJoined"}


def left(job: Job, workers: list[str], reason: str, preemptions: int) -> None:
    """Check that these workers left after a notice with this reason, without unplanned takeovers, and were replaced."""
    assert job.told(reason).startswith(tuple(f"{worker}: " for worker in workers))
    job.until_pods(lambda pods: not pods.keys() & set(workers) and len(pods) == 3)
    ungate(job)
    job.wait(lambda s: not set(workers) & set(owners(s)))
    job.wait(lambda _: job.pods().keys() <= joined(job))  # the condition may be from before they left
    assert whole(job)["preemptions"] == preemptions
    assert "Takeover" not in [pair[0] for pair in job.events()], f"a notice was of no use: {job.events()}"
