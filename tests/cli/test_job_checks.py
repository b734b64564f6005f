"""What a diagnosis says of a namespace and a job."""

from typing import Any

import pytest

from bamboo.remote.diagnosis.facts import Unreadable
from diagnosis_kit import claim, found, lines, spec

QUOTA = {
    "metadata": {"name": "small"},
    "status": {"hard": {"pods": "4", "requests.cpu": "8"}, "used": {"pods": "4", "requests.cpu": "7500m"}},
}
WITHOUT_PRICE = spec(nodePools=[{"name": "spot", "preset": "Karpenter"}])
QUEUED = spec(queue={"name": "q"})
STOPPED = {"status": {"conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue is stopped"}]}}
UNPRICED = "warning prices: none is known for node pools spot, so status, budget and objective Value cannot count money"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"namespace_object": None}, "problem namespace team: it does not exist"),
        ({"quotas": [QUOTA]}, "problem quota small: it is used up: pods"),
        ({"claim": None}, "problem claim states: there is none, so workers wait for it"),
        ({"claim": claim("Lost")}, "problem claim states: its volume is lost"),
        ({"claim": claim("Pending")}, "warning claim states: it is Pending"),
        (
            {"claim": claim("Bound", "ReadWriteOnce")},
            "problem claim states: only one node can mount it (ReadWriteOnce), for 4 workers",
        ),
        ({"claim": Unreadable("permission denied")}, "unknown claim states: permission denied"),
        (
            {"spec": spec(checkpoint=None)},
            "warning checkpoints: the job keeps none: if a stage's last copy is lost it begins again at step 0",
        ),
        (
            {"spec": spec(checkpoint={"storage": {"uri": "s3://bucket/folder"}})},
            "unknown checkpoints: s3://bucket/folder is tried by the workers when the job starts, and not from here",
        ),
        ({"spec": WITHOUT_PRICE}, UNPRICED),
        ({"spec": QUEUED}, "problem queue q: team has no such LocalQueue of kueue.x-k8s.io/v1beta2"),
        ({"spec": QUEUED, "queue": Unreadable("denied")}, "unknown queue q: denied"),
        ({"spec": QUEUED, "queue": STOPPED}, "problem queue q: it is not active: ClusterQueue is stopped"),
    ],
)
def test_each_fault_is_one_line(changes: dict[str, Any], said: str) -> None:
    assert lines(found(**changes)) == [said]


def test_a_queue_that_is_there_is_well() -> None:
    assert not lines(found(spec=QUEUED, queue={}))
