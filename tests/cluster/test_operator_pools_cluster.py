"""Which nodes a job uses: fallback pools, the way back, and how many pipelines there are to be."""

import pytest

from cluster.client import Json
from cluster.handle import Cluster
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
