"""Bamboo itself as simple arithmetic."""

from collections.abc import Sequence

import pytest

from bamboo.simulation.strategies.costs import Costs
from bamboo.simulation.strategies.policies.redundancy import HEAL_STEPS, Redundancy
from bamboo.simulation.strategies.policy import Saving
from strategy_kit import COSTS, DETECTION, profile, run

NEVER = Saving(every=1e9, pause=0.0, delay=0.0)


def redundancy(choices: Sequence[int] = (2,), *, replicas: bool = True, costs: Costs = COSTS) -> Redundancy:
    return Redundancy(costs=costs, choices=tuple(choices), replicas=replicas, saving=NEVER, mtbf=1e9)


def test_a_neighbour_takes_over_and_no_sample_is_done_again() -> None:
    """One pipeline of two stages: without b, a does both, 8 x 2 x 2 + 2 s a step, after 5 s and half of a stage's step;
    with c from 150 s it is a grid again, after 0.43 steps."""
    first, lost = (0.0, "a b", ""), (100.0, "", "b")
    found = run(redundancy(), first, lost, duration=200)
    assert (found.redone, found.stalled) == pytest.approx((0, 30 + DETECTION + 8))
    assert found.samples == pytest.approx(70 * 8 / 18 + 87 * 8 / 34)
    healed = run(redundancy(), first, lost, (150.0, "c", ""), duration=200)
    assert healed.samples == pytest.approx(70 * 8 / 18 + 37 * 8 / 34 + (50 - HEAL_STEPS * 18) * 8 / 18)


def test_two_neighbours_at_once_need_a_peer_in_another_pipeline() -> None:
    alone = run(redundancy((4,)), (0, "a b c d", ""), (100, "e f", "b c"), duration=200)
    assert alone.redone == pytest.approx(70)
    peers = run(redundancy(), (0, "a b c d", ""), (100, "", "a b"), duration=200)
    assert peers.redone == 0
    without = run(redundancy(replicas=False), (0, "a b", ""), (100, "c", "b"), duration=200)
    assert without.redone == pytest.approx(70)


def test_a_replica_that_is_being_filled_does_not_help_yet() -> None:
    """b's stage is with a alone until c has a copy, after 5 + 10 s; to lose a in that time is fatal, later not."""
    costs = Costs(profile(state=10, flow=2.0, memory=10**6), 8)
    for at, redone in ((112.0, True), (150.0, False)):
        changes = ((0.0, "a b c", ""), (100.0, "", "b"), (at, "d e", "a"))
        found = run(redundancy((3,), costs=costs), *changes, duration=300)
        assert bool(found.redone) is redone


def test_layers_are_split_anew_for_whoever_is_left_if_that_is_faster() -> None:
    """12 layers on 4 stages of 3 s: a doubled one makes 57 s of 33; 3 stages of 4 s take 40, after 0.6 steps. Of 4
    layers a doubled stage makes 19 s of 11, and 3 stages, of which one has two layers, would take 20.
    """
    changes = ((0.0, "a b c d", ""), (100.0, "", "b"))
    split = run(redundancy((3, 4), costs=Costs(profile(12), 8)), *changes, duration=200)
    assert split.samples == pytest.approx(70 * 8 / 33 + (100 - DETECTION - 12 - 24) * 8 / 40)
    stays = run(redundancy((3, 4)), *changes, duration=200)
    assert stays.samples == pytest.approx(70 * 8 / 11 + (100 - DETECTION - 4) * 8 / 19)
