"""Histograms of metrics, which count every observed value once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.histogram import Histogram


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.1, 90), min_size=1, unique=True).map(sorted))
def test_a_histogram_counts_every_value_once(observed: list[float], bounds: list[float]) -> None:
    found = Histogram.of(tuple(bounds), observed)
    assert [count for _, count in found.cumulative()] == [
        *(sum(value <= bound for value in observed) for bound in bounds),
        len(observed),
    ]
    assert found.total == pytest.approx(sum(observed))
