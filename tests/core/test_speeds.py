"""What workers and layers take, told apart."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.planning.splits.speeds import Measurement, speeds


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
    """Each runs a stage, and times the next one's layers, too."""
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


def test_when_all_are_slow_nobody_is() -> None:
    found = speeds([Measurement(f"w{d}{s}", (s, s + 1), 7.0) for d in range(2) for s in range(2)])
    assert set(found.slowness.values()) == {1.0}
