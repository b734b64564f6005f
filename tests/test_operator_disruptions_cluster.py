"""What Kubernetes itself holds back, refuses and takes away: gates, Pod Security, budgets, evictions, preemptions."""

import pytest

from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import GPU
from operator_jobs import TOLERATE, small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

GATE = "test.dev/budget"
PRIORITY = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(autouse=True)
def _today(installed: Cluster) -> None:
    if installed.minor < OLDEST_SUPPORTED:
        pytest.skip("the API server is older than what Bamboo supports")


def whole(job: Job) -> Json:
    return job.wait(lambda s: s["state"] == "Running" and condition(s, "WorkersReady")["status"] == "True")


def owners(job: Job) -> dict[str, str]:
    """The nodes of the workers that train, by the workers' names."""
    plan = job.status()["plan"]
    return {name: pod["spec"]["nodeName"] for name, pod in job.pods().items() if name in plan}


def test_scheduling_gates_hold_workers_back(installed: Cluster, namespace: str, operator: Operator) -> None:
    document = small("gated")
    document["spec"]["worker"]["template"]["spec"]["schedulingGates"] = [{"name": GATE}]
    job = Job(installed.api, namespace, document)
    status = job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "Gated")
    assert f"2 worker(s) are held back by scheduling gates: {GATE}" in condition(status, "WorkersReady")["message"]
    pods = job.pods()
    assert {pod["status"]["conditions"][0]["reason"] for pod in pods.values()} == {"SchedulingGated"}
    for name in pods:
        installed.api.patch(f"/api/v1/namespaces/{namespace}/pods/{name}", {"spec": {"schedulingGates": None}})
    whole(job)
    assert job.pods().keys() == pods.keys()


def test_pod_security_lets_workers_in_and_no_privileged_ones(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    installed.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    document = small("privileged")
    container = {"name": "trainer", "securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}
    document["spec"]["worker"]["template"]["spec"]["containers"] = [container]
    refused = Job(installed.api, namespace, document)
    assert 'violates PodSecurity "restricted' in refused.told("ClusterRefuses")
    assert refused.pods() == {}
    job = Job(installed.api, namespace, small("restricted", steps=20))
    job.until("Complete")


def test_what_kubernetes_takes_away_is_no_fault_of_the_worker(
    installed: Cluster, namespace: str, operator: Operator
) -> None:
    """Each as Kubernetes tells it in the pod's condition DisruptionTarget: by name, and with a takeover in time."""
    job = Job(installed.api, namespace, small("moving", standby=1))
    whole(job)
    selector = {"matchLabels": {"bamboo.dev/job-name": "moving"}}
    budget = {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "all"},
        "spec": {"minAvailable": 3, "selector": selector},
    }  # fmt: skip
    installed.api.create(budget, namespace)
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/all"
    installed.api.wait(path, lambda found: found.get("status", {}).get("currentHealthy") == 3)
    victim = next(iter(owners(job)))
    with pytest.raises(ApiError, match=r"429 .*disruption budget"):
        evict(installed, namespace, victim)
    installed.api.delete(path)
    installed.api.wait(path, lambda found: not found)
    evict(installed, namespace, victim)
    left(job, victim, "EvictionByEvictionAPI", 1)

    victim, node = next(iter(owners(job).items()))
    on_it = [name for name, pod in job.pods().items() if pod["spec"].get("nodeName") == node]
    assert on_it == [victim], "the workers are not spread over the zones"
    installed.taint(node, "test.dev/maintenance")
    left(job, victim, "DeletionByTaintManager", 2)
    installed.untaint(node, "test.dev/maintenance")

    victim, node = next(iter(owners(job).items()))
    important = f"important-{namespace}"
    installed.api.request("POST", PRIORITY, {"metadata": {"name": important}, "value": 1000})
    try:
        spec = {
            "priorityClassName": important, "tolerations": TOLERATE, "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "all", "image": "x", "command": ["sleep", "1000"], "resources": {"limits": {GPU: "8"}},
            }],
        }  # fmt: skip
        installed.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "all"}, "spec": spec}, namespace)
        left(job, victim, "PreemptionByScheduler", 3)
    finally:
        installed.api.delete(f"{PRIORITY}/{important}")


def evict(cluster: Cluster, namespace: str, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)


def left(job: Job, worker: str, reason: str, preemptions: int) -> None:
    """It was told so, and the job is whole again without it."""
    assert job.told(reason).startswith(f"{worker}: ")
    job.until_pods(lambda pods: worker not in pods and len(pods) == 3)
    job.wait(lambda s: worker not in s["plan"])
    assert whole(job)["preemptions"] == preemptions
    assert "Takeover" not in [pair[0] for pair in job.events()], f"a notice was of no use: {job.events()}"
