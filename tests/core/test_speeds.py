"""Speeds of workers and costs of layers from measured times, and uneven splits."""

import random
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.splits.speeds import Measurement, speeds, step_seconds, uneven_split


def test_side_by_side_the_slow_one_is_found_whatever_the_layers_take() -> None:
    taken = {"a": 2.0, "b": 1.0, "c": 1.0}
    found = speeds([Measurement(f"{w}{s}", (s, s + 1), k * (s + 1)) for s in range(3) for w, k in taken.items()])
    assert [found.excess(f"{w}{s}") for s in range(3) for w in taken] == pytest.approx([2, 2 / 3, 2 / 3] * 3)
    assert [found.seconds[s, s + 1] for s in range(3)] == pytest.approx([1, 2, 3])


@given(
    slowness=st.lists(st.floats(0.5, 4), min_size=2, max_size=12),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_in_a_ring_each_ones_slowness_comes_out(slowness: list[float], data: st.DataObject, seed: int) -> None:
    """`speeds` tells slow workers from costly layers if each worker also times the next stage's layers."""
    size = len(slowness)
    work = data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    measured = [
        Measurement(f"w{i}", (s, s + 1), slowness[i] * work[s]) for i in range(size) for s in (i, (i + 1) % size)
    ]
    random.Random(seed).shuffle(measured)
    found = speeds(measured)
    middle = sorted(slowness)[(size - 1) // 2]
    for i in range(size):
        assert found.slowness[f"w{i}"] / found.slowness["w0"] == pytest.approx(slowness[i] / slowness[0], rel=1e-6)
        assert found.slowness[f"w{i}"] == pytest.approx(slowness[i] / middle, rel=1e-6)
        assert found.seconds[i, i + 1] == pytest.approx(work[i] * middle, rel=1e-6)


def test_who_has_nobody_to_be_compared_with_is_not_called_slow() -> None:
    found = speeds([Measurement("a", (0, 3), 1.0), Measurement("b", (3, 6), 5.0)])
    assert (found.excess("a"), found.excess("b")) == (None, None)
    assert found.slowness == {"a": 1.0, "b": 1.0}
    assert found.seconds == pytest.approx({(0, 3): 1.0, (3, 6): 5.0})


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
    workers = workers[: len(costs)]
    layers, stages = len(costs), len(workers)
    slowness, fixed = [k for k, _ in workers], tuple(f for _, f in workers)
    ranges = uneven_split(costs, slowness, fixed)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == layers
    assert all(a < b for a, b in ranges)
    best = inf
    for cuts in combinations(range(1, layers), stages - 1):
        best = min(best, longest(costs, slowness, tuple(pairwise((0, *cuts, layers))), fixed))
    assert longest(costs, slowness, ranges, fixed) == pytest.approx(best, rel=1e-9)


def test_of_equally_good_splits_the_most_even_one_is_taken() -> None:
    assert [b - a for a, b in uneven_split([9.0, *[1.0] * 8], [1, 1, 1])] == [1, 4, 4]


def test_a_step_takes_the_way_of_the_first_microbatch_and_the_longest_stage_for_each_other_one() -> None:
    assert step_seconds([[1, 2, 1], [1, 1, 1]], [4, 8]) == max(4 + 3 * 2, 3 + 7 * 1)
