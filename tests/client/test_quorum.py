"""A quorum of whole replicas at every step."""

import pytest

from bamboo.simulation.strategies.policies.quorum import Quorum
from bamboo.simulation.strategies.policy import Saving
from bamboo_core.planning.splits.resplit import Grid
from strategy_kit import COSTS, DETECTION, REGROUP, RENDEZVOUS, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def test_a_quorum_goes_on_without_the_replica_that_lost_a_node() -> None:
    """b's replica is lost; with e it comes back after the detection and a regroup, a rendezvous, and a last regroup."""
    policy = Quorum(costs=COSTS, grid=Grid(2, 2), saving=NEVER)
    found = run(policy, (0, "a b c d e", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + RENDEZVOUS * 0.4 + (200 - 151) * 0.8)
    assert found.stalled == pytest.approx(30 + DETECTION + REGROUP + REGROUP)
