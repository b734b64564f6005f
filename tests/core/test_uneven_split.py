"""Layers over workers of unequal speed: exact; and what workers and layers take, told apart."""

from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.splits.uneven_split import step_seconds, uneven_split

COSTS = st.one_of(st.integers(0, 6), st.floats(0, 1e3))


SLOWNESS = st.one_of(st.integers(1, 4), st.floats(0.1, 20))


def longest(
    costs: list[float], slowness: list[float], ranges: tuple[tuple[int, int], ...], fixed: tuple[float, ...] = ()
) -> float:
    more = fixed or (0.0,) * len(slowness)
    return max(k * (f + sum(costs[a:b])) for k, f, (a, b) in zip(slowness, more, ranges, strict=True))


@given(
    costs=st.lists(COSTS, min_size=1, max_size=9),
    workers=st.lists(st.tuples(SLOWNESS, st.one_of(st.just(0.0), COSTS)), min_size=1, max_size=5),
)
def test_no_other_split_has_a_shorter_longest_stage(costs: list[float], workers: list[tuple[float, float]]) -> None:
    layers, stages = len(costs), len(workers)
    slowness, fixed = [k for k, _ in workers], tuple(f for _, f in workers)
    if layers < stages:
        with pytest.raises(ValueError, match="expected at least"):
            uneven_split(costs, slowness, fixed)
        return
    ranges = uneven_split(costs, slowness, fixed)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == layers
    assert all(a < b for a, b in ranges)
    best = inf
    for cuts in combinations(range(1, layers), stages - 1):
        best = min(best, longest(costs, slowness, tuple(pairwise((0, *cuts, layers))), fixed))
    assert longest(costs, slowness, ranges, fixed) == pytest.approx(best, rel=1e-9)


def test_a_heavy_layer_does_not_go_to_a_slow_worker_however_the_others_are_filled() -> None:
    """Filled greedily the first stage would take two layers, and the slow one could not hold the third."""
    assert uneven_split([1, 1, 10, 1], [1, 10, 1]) == ((0, 1), (1, 2), (2, 4))


def test_a_worker_at_half_speed_gets_half_the_layers() -> None:
    assert [b - a for a, b in uneven_split([1.0] * 14, [1, 2, 1, 1])] == [4, 2, 4, 4]


def test_of_equally_good_splits_the_most_even_one_is_taken() -> None:
    assert [b - a for a, b in uneven_split([9.0, *[1.0] * 8], [1, 1, 1])] == [1, 4, 4]


def test_a_step_takes_the_way_of_the_first_microbatch_and_the_longest_stage_for_each_other_one() -> None:
    assert step_seconds([[1, 2, 1], [1, 1, 1]], [4, 8]) == max(4 + 3 * 2, 3 + 7 * 1)
