"""Layers split anew for the sake of speed: whether it pays is measured, remembered, and not tried without end."""

from dataclasses import replace
from math import log

from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo.planning.backoff import GROWTH, LASTING, MOST_LEVELS, Backoff
from bamboo.planning.splits.tried_splits import MOST_TRIED, TriedSplit, are_alike, comparable, remembering
from slow_world import Slowed, trained

HALVES, THIRDS = ((0, 4), (4, 8)), ((0, 3), (3, 8))


def test_a_split_that_does_not_pay_is_taken_back_and_not_tried_again() -> None:
    """The dear backward is not seen in forwards, so it is put down to all layers of its stage: without that layer the
    stage is expected to be shorter than the one that gets it turns out to be.
    """
    world = trained(2, 1, 0, fewest=2)
    world.backward = {3: 6.0}
    world.train(600)
    assert world.reasons() == ["Rebalancing", "RebalancingDidNotPay", "Rebalancing", "Rebalanced"]
    assert world.state.plan is not None
    assert world.state.plan.stages == HALVES
    assert "a step takes 4 s; 2.89 s were expected, and it took 3.52 s" in world.said("RebalancingDidNotPay")[0]
    assert "split as they were before" in world.said("Rebalancing")[1]
    assert world.state.stragglers.trial is None


def test_it_is_tried_again_when_speeds_have_changed() -> None:
    world = trained(2, 1, 0, fewest=2)
    world.backward = {3: 6.0}
    world.train(200)
    assert world.reasons().count("Rebalancing") == 2
    world.slowness[world.owner(0)] = 2.0
    world.train(400)
    assert world.reasons()[4:7] == ["StragglerFound", "Rebalancing", "Rebalanced"]
    assert world.state.plan is not None
    assert world.state.plan.stages[0][1] < 4


def test_a_split_that_is_no_worse_stays_since_going_back_would_not_pay() -> None:
    """A step does not take what it was expected to, but going back would not make it shorter."""
    world = trained(2, 1, 0, fewest=2)
    world.slowness[world.owner(0)] = 2.0
    seconds, world.away = world.step_seconds(), 1000
    world.train(600, seconds=seconds)
    others = {"StragglerReplacementRequested", "StragglerKept"}
    assert [r for r in world.reasons() if r not in others] == ["StragglerFound", "Rebalancing", "RebalancingDidNotPay"]
    assert world.state.plan is not None
    assert world.state.plan.stages == THIRDS


def test_nothing_is_said_of_a_split_if_speeds_have_changed_meanwhile() -> None:
    world = trained(2, 1, 0, fewest=2)
    slow = world.owner(0)
    world.slowness[slow] = 2.0
    while world.state.stragglers.trial is None:
        world.train(1)
    world.slowness[slow] = 5.0
    world.train(30)
    assert not {"Rebalanced", "RebalancingDidNotPay"} & set(world.reasons())


def test_speeds_that_change_all_the_time_are_not_chased() -> None:
    world = trained(2, 1, 0, fewest=2)
    first, second = world.owner(0), world.owner(1)
    moves = []
    for turn in range(30):
        world.slowness = {first if turn % 2 else second: 3.0}
        before = world.reasons().count("Rebalancing")
        world.train(40)
        moves += [turn] * (world.reasons().count("Rebalancing") - before)
    assert 1 <= len(moves) <= 4, moves
    assert len([turn for turn in moves if turn >= 8]) <= 1, "in the last 880 of 1200 steps"


def test_once_a_split_has_lasted_the_next_one_comes_sooner_again() -> None:
    world = trained(2, 1, 0, fewest=2)
    first, second = world.owner(0), world.owner(1)
    for turn in range(4):
        world.slowness = {first if turn % 2 else second: 3.0}
        world.train(40)
    assert world.state.stragglers.backoff.level == 1, "two moves, one soon after the other"
    world.train(600)
    level, moves = world.state.stragglers.backoff.level, world.reasons().count("Rebalancing")
    assert level >= 1
    world.slowness = {}
    world.train(60)
    assert world.reasons().count("Rebalancing") == moves + 1
    assert world.state.stragglers.backoff.level == level - 1


def test_who_cannot_be_compared_yet_after_a_split_is_still_slow() -> None:
    """What is done in advance is measured later than the rest; until then nothing can be said of the split, either."""
    world = trained(2, 1, 0, fewest=2)
    world.slowness[world.owner(0)] = 3.0
    while world.state.stragglers.trial is None:
        world.train(1)
    world.shadows = False
    world.train(25)
    assert world.reasons() == ["StragglerFound", "Rebalancing"]
    world.shadows = True
    world.train(200)
    assert world.reasons() == ["StragglerFound", "Rebalancing", "Rebalanced"]


@settings(max_examples=8, deadline=None)
@given(
    speeds=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from((1.0, 1.2, 1.5, 3.0)), st.integers(3, 60)), min_size=1, max_size=12
    ),
    noise=st.lists(st.floats(0.7, 1.4), min_size=7, max_size=7),
)
def test_however_noisy_speeds_are_moves_are_few(speeds: list[tuple[int, float, int]], noise: list[float]) -> None:
    """One of three workers has another speed for some steps, and all vary in each."""
    world = Slowed(3, 1, 0, fewest=3)
    world.settle()
    workers = [world.owner(stage) for stage in range(3)]
    total = 0
    for which, factor, steps in speeds:
        for i in range(steps):
            world.slowness = {w: noise[(total + i + 3 * j) % 7] for j, w in enumerate(workers)}
            world.slowness[workers[which]] *= factor
            world.train(1)
        total += steps
    decided = world.state.stragglers.backoff
    moves = world.reasons().count("Rebalancing")
    assert moves <= 2 * most_measures(total / 20), "each may be followed by going back"
    assert decided.level <= MOST_LEVELS


def most_measures(shortest_waits: float) -> float:
    """In that time, whatever asks for them."""
    return 2 + log(max(1.0, shortest_waits)) / log(GROWTH) + 2 * shortest_waits / LASTING


@given(
    shortest=st.floats(0.1, 100.0),
    asked=st.lists(st.floats(0.0, 30.0) | st.floats(0.0, 3000.0), min_size=1, max_size=200),
)
def test_measures_are_few_whenever_they_are_asked_for(shortest: float, asked: list[float]) -> None:
    """asked: the time between two occasions, in shortest waits."""
    backoff, now, acted = Backoff(), 0.0, 0
    for pause in asked:
        now += pause * shortest
        backoff = backoff.wanted(now)
        if backoff.is_over(shortest, now):
            backoff, acted = backoff.after(shortest, now), acted + 1
    assert acted <= most_measures(now / shortest)


def test_the_wait_grows_and_becomes_shorter_again() -> None:
    backoff, now, levels = Backoff(), 0.0, []
    for pause, wanted in ((0, 0), (1, 1), (4, 2), (16, 16), (64, 11), (200, 150), (8, 3)):
        now += pause
        assert backoff.is_over(1.0, now)
        backoff = backoff.wanted(now - pause + wanted).after(1.0, now)
        levels.append(backoff.level)
    assert levels == [0, 1, 2, 1, 0, 0, 1]
    assert not backoff.is_over(1.0, now + 3.9)


def test_what_was_measured_counts_while_all_is_about_as_it_was() -> None:
    usual, slow = ((1.0, 1.0),), ((2.0, 1.0),)
    tried = (TriedSplit(HALVES, usual, 1.0), TriedSplit(THIRDS, usual, 1.2), TriedSplit(HALVES, slow, 2.0))
    assert comparable(tried, HALVES, ((1.1, 0.95),), 1.1) == {HALVES: 1.0, THIRDS: 1.2}
    assert comparable(tried, HALVES, ((1.9, 1.1),), 2.1) == {HALVES: 2.0}
    assert comparable(tried, HALVES, ((1.0, 2.0),), 1.0) == {}
    assert comparable(tried, THIRDS, slow, 2.0) == {}
    assert comparable(tried, HALVES, usual, 1.5) == {}, "something else has changed"
    assert not are_alike(usual, ((1.0, 1.0), (1.0, 1.0)))
    newer = remembering(tried, TriedSplit(HALVES, ((1.1, 1.0),), 1.5))
    assert (len(newer), comparable(newer, HALVES, usual, 1.5)[HALVES]) == (3, 1.5), "the newest counts"
    for i in range(2 * MOST_TRIED):
        newer = remembering(newer, replace(tried[0], paces=((2.0**i, 1.0),)))
    assert len(newer) == MOST_TRIED


def test_a_measurement_does_not_count_if_a_worker_became_slow_that_nobody_can_be_compared_with() -> None:
    """Without shadows all workers count as equally fast. What a step took before says nothing of what it would now."""
    world = trained(2, 1, 0, fewest=2, shadows=False)
    world.work = dict.fromkeys(range(4), 2.0)
    world.train(60)
    assert world.reasons() == ["Rebalancing", "Rebalanced"]
    plan = world.state.plan
    assert plan is not None
    world.slowness = dict.fromkeys(world.state.workers, 1.8)
    world.train(300)
    assert world.reasons() == ["Rebalancing", "Rebalanced"]
    assert world.state.plan == plan
