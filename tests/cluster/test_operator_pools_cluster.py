"""Which nodes a job uses: fallback pools, the way back, and how many pipelines there are to be."""

import pytest

from cluster.client import ApiError, Json
from cluster.handle import OLDEST_SUPPORTED, Cluster
from cluster.nodes import on_demand, spot
from operator_jobs import small
from operator_process import Job, Operator, condition

pytest_plugins = ["cluster_kit", "operator_fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

POOLS = [
    {"name": "spot", "preset": "Karpenter", "pricePerHour": "0.9"},
    {
        "name": "fallback",
        "capacity": "OnDemand",
        "preset": "Karpenter",
        "pricePerHour": "3",
        "afterSeconds": 4,
    },
]


def test_a_fallback_is_used_and_left_again(installed: Cluster, namespace: str, operator: Operator) -> None:
    installed.add(on_demand("on-demand-large", "zone-b", gpus=27))
    job = Job(installed.api, namespace, small("falling-back", gpus=9, nodePools=POOLS))
    job.wait(lambda s: condition(s, "WorkersReady").get("reason") == "Unschedulable")
    assert condition(job.status(), "FallbackActive")["status"] == "False"
    assert "pool fallback is tried" in job.told("FallbackPool")
    job.until("FallbackActive")
    status = job.wait(lambda s: s["state"] == "Running" and float(s["cost"]["perHour"]) == 6)
    assert "2 worker(s) in node pool fallback" in condition(status, "FallbackActive")["message"]

    installed.add(spot("spot-large", "zone-d", gpus=27))
    status = job.wait(
        lambda s: condition(s, "FallbackActive")["status"] == "False" and float(s["cost"]["perHour"]) == 1.8
    )
    job.until("WorkersReady")
    job.until_pods(lambda pods: _in_pools(pods) == ["spot", "spot"])
    status = job.status()
    assert status["preemptions"] == 0, "what the operator itself wants is no preemption"
    assert condition(status, "Running")["status"] == "True"


def _in_pools(pods: dict[str, Json]) -> list[str]:
    return sorted(pod["metadata"]["labels"]["bamboo.dev/node-pool"] for pod in pods.values())


def test_a_job_is_scaled(installed: Cluster, namespace: str, operator: Operator) -> None:
    job = Job(installed.api, namespace, small("scaled", elastic={"maxWorkers": 2, "stabilizationSeconds": 1}))
    job.until("WorkersReady")

    job.edit({"elastic": {"maxWorkers": 4}})
    job.wait(lambda s: s["pipelines"] == {"stages": 2, "desired": 2, "ready": 2})

    job.edit({"elastic": {"maxWorkers": 2}})
    job.wait(lambda s: s["pipelines"]["ready"] == 1)
    job.until_pods(lambda pods: len(pods) == 2)
    status = job.wait(lambda s: s["state"] == "Running" and s["workers"]["ready"] == 2)
    assert status["preemptions"] == 0

    job.edit({"standby": {"workers": 1}})
    job.wait(lambda s: s["workers"]["ready"] == 3)
    job.edit({"redundancy": {"mode": "LazyForward"}})
    job.told("ModeChanged")
    if installed.minor >= OLDEST_SUPPORTED:
        with pytest.raises(ApiError, match=r"spec\.training: .*cannot change; create a new job instead"):
            job.edit({"training": {"steps": 5}})
    else:  # whose API server knows no rules
        job.edit({"training": {"steps": 5}})
        assert "fixed while the job runs" in job.told("ChangeRefused")
    assert job.status()["training"]["steps"] == 100_000
