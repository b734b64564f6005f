"""Checkpoints in the memory of peers."""

import pytest

from bamboo.simulation.strategies.policies.memory_checkpoints import OVERHEAD, MemoryCheckpoints
from bamboo.simulation.strategies.policy import Saving
from bamboo_core.planning.splits.resplit import Grid
from strategy_kit import DETECTION, costs_of, profile, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def test_memory_checkpoints_replay_a_window_with_a_spare_node() -> None:
    """A stage's 20 bytes need 2 steps of 18 s at 0.6 bytes/s: a window of 2; 1.5 of them are replayed, 16 s a step."""
    costs = costs_of(profile(state=10, flow=0.6, memory=10**6), 8)
    policy = MemoryCheckpoints(costs=costs, stages=2, saving=NEVER)
    assert policy.window(Grid(2, 1)) == 2
    start, again = costs.restart(2), DETECTION + costs.regroup(2) + 1.5 * 2 * 16
    found = run(policy, (0, "a b c", ""), (200, "", "b"), duration=400)
    assert found.stalled == pytest.approx(start + again)
    assert found.samples == pytest.approx((400 - start - again) * 8 / 18 / (1 + OVERHEAD))
    waiting = run(policy, (0, "a b", ""), (200, "", "b"), duration=400)
    assert waiting.idle == pytest.approx(200)
