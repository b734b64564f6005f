"""For how long a worker's node was paid for while no operator looked."""

from datetime import timedelta
from typing import Any

import pytest

from bamboo_operator.jobs.cost_counter import paid_seconds
from operator_kit import NOW, at, pod


def placed(seconds: float, **more: Any) -> dict[str, Any]:
    """A worker's pod that got its node then."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(seconds)}
    made = pod(**more)
    made["status"]["conditions"] = [scheduled]
    made["spec"]["nodeName"] = "n1"
    return made


ENDED = {"exitCode": 1, "finishedAt": at(-40)}


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        (placed(-1000), 100),
        (placed(-30), 30),
        (placed(-1000, phase="Failed", ended=ENDED), 60),
        (placed(-30, phase="Failed", ended=ENDED), 0),
        (placed(-1000, phase="Failed"), 0),
        (placed(-1000, deleted=at(10), grace=30), 80),
        (placed(-1000, deleted=at(-200), grace=30), 0),
        (placed(5), 0),
        (pod(phase="Pending"), 0),
    ],
    ids=["all the time", "since it came", "until it ended", "ended before it came", "ended at a time that nobody tells",
         "until it was deleted", "deleted before", "a node's clock that is ahead", "without a node"],
)  # fmt: skip
def test_a_node_is_paid_for_from_when_a_pod_has_it_until_its_worker_ends(made: dict[str, Any], seconds: float) -> None:
    assert paid_seconds(made, NOW - timedelta(seconds=100), NOW) == pytest.approx(seconds)


def test_before_anything_was_counted_nothing_was_left_out() -> None:
    assert paid_seconds(placed(-1000), None, NOW) == 0
