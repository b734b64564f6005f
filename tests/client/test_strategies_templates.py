"""Pipeline templates."""

import pytest

from bamboo.simulation.strategies.policies.templates import Templates
from bamboo.simulation.strategies.policy import Saving, View
from strategy_kit import COSTS, costs_of, profile, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def test_templates_use_all_nodes_and_lose_the_step() -> None:
    """5 nodes as 3 + 2; then 2 + 2 after 5 + 8 s, without the half step that was done."""
    policy = Templates(costs=COSTS, shortest=2, longest=4, tolerated=1, saving=NEVER, mtbf=1e9)
    found = run(policy, (0, "a b c d e", ""), (100, "", "c"), duration=200)
    before = 8 / min(COSTS.uneven((3, 2)), COSTS.uneven((2, 2)))
    assert found.samples == pytest.approx(70 * before - 4 + 87 * 0.8)


def test_templates_go_back_if_a_layer_has_no_copy_left() -> None:
    policy = Templates(costs=COSTS, shortest=1, longest=2, tolerated=1, saving=NEVER, mtbf=1e9)
    first = (0.0, "a b c d", "")
    kept = run(policy, first, (100.0, "", "a c"), duration=100 + 5 + 8)
    assert kept.redone < 10  # four pipelines of one stage: every node has all layers
    pairs = Templates(costs=COSTS, shortest=2, longest=2, tolerated=1, saving=NEVER, mtbf=1e9)
    gone = run(pairs, first, (100.0, "e f", "a c"), duration=200)
    assert (gone.redone, gone.samples) == pytest.approx((70, 65 * 0.8))


def test_templates_whose_nodes_lack_memory_are_none() -> None:
    """A node holds two of four layers; so three nodes are one pipeline of three, and none of a single node."""
    policy = Templates(
        costs=costs_of(profile(state=400), 8), shortest=1, longest=4, tolerated=0, saving=NEVER, mtbf=1e9
    )
    assert [len(policy.react((), View(now=0.0, ready=ready))[0]) for ready in (("a",), ("a", "b", "c"))] == [0, 1]
