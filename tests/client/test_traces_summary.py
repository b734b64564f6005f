"""The figures of a recording."""

import pytest

from bamboo.traces.files import parse_trace
from bamboo.traces.summary import removals_by_hour, summarize
from bamboo.traces.trace import Change, NodeChange, make_trace
from node_trace_kit import OWN


def test_a_summary_counts_removals_lifetimes_and_node_hours() -> None:
    trace = make_trace(
        [NodeChange(at=0.0, change=Change.ADD, node=name) for name in "abcd"]
        + [NodeChange(at=3600.0, change=Change.REMOVE, node=name) for name in "ab"]
        + [NodeChange(at=5400.0, change=Change.REMOVE, node="c")],
        duration=7200.0,
    )
    found = summarize(trace)
    assert (found.added, found.removed, found.peak) == (4, 3, 4)
    assert found.node_hours == 4 + 1 + 0.5
    assert found.mean_nodes == 5.5 / 2
    assert (found.removals_per_hour, found.removal_instants, found.largest_batch) == (1.5, 2, 2)
    assert found.removals_per_node_hour == 3 / 5.5
    assert (found.mean_lifetime, found.median_lifetime) == (4200.0, 3600.0)
    assert (found.usd_per_hour, found.zones) == (None, ())
    assert removals_by_hour(trace) == (0, 3)
    assert summarize(make_trace()).mean_nodes == 0


def test_the_mean_price_is_over_time_and_nodes() -> None:
    """n1 two hours at 1; n2 half an hour at its zone's first price, then half an hour at 2."""
    assert summarize(parse_trace("t", OWN)).usd_per_hour == pytest.approx((2 * 1 + 1 * 2) / 3)
