"""A simulated job asks the pool first whose hours cost least, by what was lost before; the operator's own order."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo.simulation.job.pool_value import SeenPools
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.hazards import Exposure
from bamboo_core.planning.pool_order import LossCost
from bamboo_core.traces.trace import Change, NodeChange, Trace, make_trace
from job_simulation_kit import HOUR, job, run

ZONE = "topology.kubernetes.io/zone"
ZONES = ("risky", "calm")


def test_a_node_that_is_taken_away_is_lost_and_one_that_is_left_is_not() -> None:
    seen = SeenPools()
    for node in ("n0", "n1", "n2"):
        seen.placed(node, ("p", "a"), 0.0)
    seen.placed("n0", ("p", "a"), 1800.0)
    seen.went("n0", HOUR, lost=True)
    seen.went("n1", HOUR, lost=False)
    seen.went("never used", HOUR, lost=False)
    assert seen.exposures(2 * HOUR) == {("p", "a"): Exposure(losses=1, hours=4.0)}
    pools = [NodePool(name="p"), NodePool(name="other")]
    ranks = seen.rank(pools, LossCost(seconds=3600, job=10, start=0), 2 * HOUR)
    assert [rank.name for rank in ranks] == ["other", "p"]


def two_zones(hours: int) -> Trace:
    """Six nodes in each zone; one of the first zone is replaced every ten minutes."""
    changes = [
        NodeChange(at=0.0, change=Change.ADD, node=f"{zone}-{number}", zone=zone)
        for zone in ZONES
        for number in range(6)
    ]
    for number in range(6 * hours):
        node = f"risky-{number % 6}"
        at = 600.0 * (number + 1)
        changes.append(NodeChange(at=at, change=Change.REMOVE, node=node, zone="risky"))
        changes.append(NodeChange(at=at + 60, change=Change.ADD, node=node, zone="risky"))
    return make_trace(changes, duration=hours * HOUR)


@pytest.mark.parametrize(
    ("order", "start", "leaves"), [("Listed", 900.0, False), ("Value", 10.0, False), ("Value", 900.0, True)]
)
def test_by_value_a_job_leaves_the_pool_that_loses_nodes_if_that_costs_much(
    order: str, start: float, *, leaves: bool
) -> None:
    """Listed it goes on to ask there, since nodes come back. start: seconds that a new worker is paid for before."""
    pools: list[dict[str, Any]] = [
        {"name": zone, "pricePerHour": "1", "template": {"spec": {"nodeSelector": {ZONE: zone}}}} for zone in ZONES
    ]
    one = job(nodePools=pools, poolOrder=order)
    times = msgspec.structs.replace(one.profile.times, start=start)
    one = replace(one, profile=msgspec.structs.replace(one.profile, times=times))
    found = run(one, two_zones(4)).figures
    assert (found.preemptions < 10) is leaves
    assert (found.preemptions == 24) is not leaves
