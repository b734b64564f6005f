"""Windows of a recording, which continue at its beginning after its end."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, Trace, make_trace
from bamboo.traces.window import window


def small() -> Trace:
    changes = [
        NodeChange(at=0.0, change=Change.ADD, node="a", zone="z"),
        NodeChange(at=0.0, change=Change.ADD, node="b"),
        NodeChange(at=40.0, change=Change.REMOVE, node="a", zone="z", notice=30.0),
        NodeChange(at=70.0, change=Change.ADD, node="c"),
    ]
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=1.0), PriceChange(at=50.0, zone="", usd_per_hour=2.0)]
    return make_trace(changes, prices, duration=100.0)


def told(trace: Trace) -> list[tuple[float, str, str]]:
    return [(one.at, one.change.value, one.node) for one in trace.changes]


def test_what_is_there_comes_at_once_and_the_end_is_followed_by_the_beginning() -> None:
    found = window(small(), 60.0, 100.0)
    assert told(found) == [
        (0.0, "add", "b"),
        (10.0, "add", "c"),
        (40.0, "remove", "c"),
        (40.0, "add", "a"),
        (80.0, "remove", "a"),
    ]
    assert [(one.at, one.usd_per_hour) for one in found.prices] == [(0.0, 2.0), (40.0, 1.0), (90.0, 2.0)]
    assert found.duration == 100.0


def test_a_notice_is_not_longer_than_the_window_before_it() -> None:
    assert [one.notice for one in window(small(), 20.0, 50.0).changes if one.change is Change.REMOVE] == [20.0]


def test_a_window_from_the_beginning_is_the_trace() -> None:
    assert told(window(small(), 0.0, 100.0))[:4] == told(small())
    assert window(make_trace(duration=5.0), 1.0, 10.0).duration == 10.0


@given(st.integers(1, 30), st.floats(0.0, 1.0), st.floats(0.01, 3.0))
def test_there_are_as_many_nodes_as_in_the_trace_at_that_time(seed: int, begin: float, rounds: float) -> None:
    """`window` calls `make_trace`, which refuses a node that is added twice, or removed while it is absent."""
    trace = generate(Generation(nodes=6, hours=3, removal=0.5, addition=0.7, zones=("a", "b")), seed)
    start = begin * trace.duration
    found = window(trace, start, rounds * trace.duration)
    for moment in (0.25, 0.5, 0.9):
        at = moment * found.duration
        assert nodes_at(found, at) == nodes_at(trace, (start + at) % trace.duration)


def nodes_at(trace: Trace, at: float) -> int:
    counts = accumulate((1 if one.change is Change.ADD else -1 for one in trace.changes if one.at <= at), initial=0)
    return list(counts)[-1]


def test_prices_of_an_empty_recording_are_none() -> None:
    assert window(make_trace(duration=10.0), 0.0, 5.0).prices == ()
    assert window(small(), 99.0, 1.0).prices[0].usd_per_hour == pytest.approx(2.0)
