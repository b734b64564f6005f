"""Microbatches of a lost node go to its peers."""

import pytest

from bamboo.simulation.strategies.policies.rerouting import Rerouting
from bamboo.simulation.strategies.policy import Saving
from bamboo_core.planning.splits.resplit import Grid
from strategy_kit import COSTS, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def test_rerouting_gives_microbatches_to_the_peers() -> None:
    """2 pipelines of 2 stages: without b the other second stage does 8 microbatches of 2 s, after one forward."""
    lost = COSTS.rerouted(Grid(2, 2), 1)
    assert 16 < lost < 18
    policy = Rerouting(costs=COSTS, stages=2, saving=NEVER)
    found = run(policy, (0, "a b c d", ""), (100, "", "b"), duration=200)
    assert found.samples == pytest.approx(70 * 0.8 - 4 + 95 * 8 / lost)
    back = run(policy, (0, "a b c d", ""), (100, "", "b"), (150, "e", ""), duration=200)
    assert back.samples == pytest.approx(70 * 0.8 - 4 + 45 * 8 / lost + 42 * 0.8)


def test_rerouting_goes_back_if_a_stage_has_nobody_left() -> None:
    found = run(Rerouting(costs=COSTS, stages=2, saving=NEVER), (0, "a b c d", ""), (100, "", "b d"), duration=200)
    assert (found.samples, found.redone) == pytest.approx((65 * 8 / 18, 70))
