"""How long one measure has to wait for the next."""

from math import log

from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.planning.splits.backoff import GROWTH, LASTING, MOST_LEVELS, Backoff
from slow_world import Slowed


@settings(max_examples=8, deadline=None)
@given(
    speeds=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from((1.0, 1.2, 1.5, 3.0)), st.integers(3, 60)), min_size=1, max_size=12
    ),
    noise=st.lists(st.floats(0.7, 1.4), min_size=7, max_size=7),
)
def test_however_noisy_speeds_are_moves_are_few(speeds: list[tuple[int, float, int]], noise: list[float]) -> None:
    """One of three workers has another speed for some steps, and all vary in each."""
    world = Slowed(3, 1, 0)
    world.settle()
    workers = [world.owner(stage) for stage in range(3)]
    total = 0
    for which, factor, steps in speeds:
        for i in range(steps):
            world.slowness = {w: noise[(total + i + 3 * j) % 7] for j, w in enumerate(workers)}
            world.slowness[workers[which]] *= factor
            world.train(1)
        total += steps
    decided = world.state.balance.backoff
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
