"""The figures of a recording."""

import pytest

from bamboo.traces.files import parse_trace
from bamboo.traces.summary import summarize
from bamboo.traces.trace import Change, NodeChange, make_trace
from node_trace_kit import OWN


def test_a_summary_counts_removals_and_node_hours() -> None:
    trace = make_trace(
        [NodeChange(at=0.0, change=Change.ADD, node=name) for name in "abcd"]
        + [NodeChange(at=3600.0, change=Change.REMOVE, node=name) for name in "ab"]
        + [NodeChange(at=5400.0, change=Change.REMOVE, node="c")],
        duration=7200.0,
    )
    found = summarize(trace)
    assert (found.peak, found.removals_per_node_hour, found.usd_per_hour) == (4, 3 / 5.5, None)
    assert summarize(make_trace()).removals_per_node_hour == 0


def test_the_mean_price_is_over_time_and_nodes() -> None:
    """n1 costs 1 USD/h for 2 h, n2 2 USD/h for 1 h: its zone's first price, recorded at 0.5 h, also counts earlier."""
    assert summarize(parse_trace("t", OWN)).usd_per_hour == pytest.approx((2 * 1 + 1 * 2) / 3)
