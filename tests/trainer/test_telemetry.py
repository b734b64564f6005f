"""Telemetry: times of a worker's spans, and the time inside its current instruction."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.telemetry import Follower, Span, Spans

CELL = Cell(1, 2)


class Noting(Follower):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def ended(self, span: Span) -> None:
        self.spans.append(span)


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from([*(name for name in TIME_USE_OF_SPAN if name != "Wait"), "Idle", "Epoch"]), st.floats(0, 2)
    ),
    max_size=40,
)


@given(MOMENTS)
def test_the_sums_are_those_of_the_spans_which_do_not_overlap(moments: list[tuple[str, float]]) -> None:
    now, noting = 100.0, Noting()
    spans = Spans(noting, clock=lambda: now)
    before = spans.seconds()
    for name, seconds in moments:
        now += seconds
        if name == "Idle":
            spans.event("Idle")
        elif name == "Epoch":
            spans.event("Epoch", epoch=1, reason="", message="", boundary=False, seconds=seconds / 2)
        else:
            spans.started(name, CELL, 0, 0)
            now += seconds
            spans.finished(name, CELL, 0, 0)
        after = spans.seconds()
        assert all(after[kind] >= before[kind] for kind in TimeUse), "a counter fell"
        before = dict(after)
    spans.started("Forward", CELL, 0, 0)  # a wait that is not over is no span
    spans.finished("Forward", CELL, 0, 0)
    sums = dict.fromkeys(TimeUse, 0.0)
    for span in noting.spans:
        sums[TIME_USE_OF_SPAN[span.name]] += span.end - span.begin
    assert dict(spans.seconds()) == pytest.approx(sums, abs=1e-4)
    in_order = sorted((span.begin, span.end) for span in noting.spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(in_order))


def test_a_wait_is_counted_while_it_lasts() -> None:
    now = 0.0
    spans = Spans(clock=lambda: now)
    spans.event("Idle")
    now = 7.0
    assert spans.seconds()[TimeUse.IDLE] == 7.0
    spans.started("Backward", CELL, 0, 0)
    now = 9.0
    assert (spans.seconds()[TimeUse.IDLE], spans.seconds()[TimeUse.BACKWARD]) == (7.0, 0.0)
    spans.finished("Backward", CELL, 0, 0)
    assert spans.seconds()[TimeUse.BACKWARD] == 2.0


def test_a_worker_says_how_long_it_has_been_inside_an_instruction() -> None:
    now = 10.0
    spans = Spans(clock=lambda: now)
    assert spans.now() == ("", 0.0)
    spans.started("Forward", CELL, 7, 3)
    now = 15.0
    assert spans.now() == ("inside Forward for stage 2 of pipeline 1, step 8, microbatch 3", 5.0)
    spans.finished("Forward", CELL, 7, 3)
    assert spans.now() == ("", 0.0)
    spans.started("Rehearsal", CELL, 7, 3)
    now = 500.0
    assert spans.now() == ("", 0.0)
