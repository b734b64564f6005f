"""What a diagnosis says of quotas, a job's queue, and nodes that fit its workers."""

from typing import Any

import pytest

from bamboo.remote.diagnosis.facts import Unreadable
from diagnosis_kit import found, lines, node, spec, spot_node

QUOTA = {
    "metadata": {"name": "small"},
    "status": {"hard": {"pods": "4", "requests.cpu": "8"}, "used": {"pods": "4", "requests.cpu": "7500m"}},
}
QUEUED = spec(queue={"name": "q"})
STOPPED = {"status": {"conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue is stopped"}]}}
TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
GPU_JOB = spec(worker={"resources": {"limits": {"nvidia.com/gpu": 1}}})
TOLERANT = spec(worker={"template": {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}})
SELECTING = spec(worker={"template": {"spec": {"nodeSelector": {"type": "a"}}}})
NONE_FITS = ["warning pool spot: no node that is ready now fits a worker"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quotas": [QUOTA]}, "problem quota small: it is used up: pods"),
        ({"spec": QUEUED}, "problem queue q: team has no such LocalQueue of kueue.x-k8s.io/v1beta2"),
        ({"spec": QUEUED, "queue": Unreadable("denied")}, "unknown queue q: denied"),
        ({"spec": QUEUED, "queue": STOPPED}, "problem queue q: it is not active: ClusterQueue is stopped"),
    ],
)
def test_each_fault_is_one_line(changes: dict[str, Any], said: str) -> None:
    assert lines(found(**changes)) == [said]


def test_a_queue_that_is_there_is_well() -> None:
    assert not lines(found(spec=QUEUED, queue={}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": [spot_node("a", ready=False)]}, ["problem nodes: none of 1 node is ready"]),
        ({"nodes": [node("a")]}, NONE_FITS),
        ({"nodes": [spot_node("a")], "spec": SELECTING}, NONE_FITS),
        ({"nodes": [spot_node("a", TAINT)]}, NONE_FITS),
        ({"nodes": [spot_node("a", TAINT)], "spec": TOLERANT}, []),
        ({"nodes": [spot_node("a", allocatable={"cpu": "3900m"})]}, NONE_FITS),
        ({"nodes": [node("a"), spot_node("b")]}, []),
        ({"nodes": [spot_node("a")], "spec": GPU_JOB}, NONE_FITS),
        ({"nodes": [spot_node("a", GPU_TAINT, allocatable={"nvidia.com/gpu": "1"})], "spec": GPU_JOB}, []),
    ],
)
def test_a_worker_is_compared_with_the_nodes(changes: dict[str, Any], said: list[str]) -> None:
    assert lines(found(**changes)) == said
