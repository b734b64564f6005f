"""What a worker spends its time on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo.local.trace_files import merge_traces
from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames.frame import FrameKind as FrameKind
from bamboo_trainer.telemetry import trace
from bamboo_trainer.telemetry.time_account import TimeAccount

CELL = Cell(0, 1)


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from([*(name for name in TIME_USE_OF_SPAN if name != "Wait"), "Idle", "Epoch"]), st.floats(0, 2)
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(MOMENTS)
def test_the_sums_are_those_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: list[tuple[str, float]]
) -> None:
    now = 100.0
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: now))
    tally, written = TimeAccount(lambda: now), trace.TraceFile(tmp_path / "w0.json", "w0", 1)
    before = tally.seconds()
    for name, seconds in moments:
        now += seconds
        for observer in (tally, written):
            if name == "Idle":
                observer.event("Idle")
            elif name == "Epoch":
                observer.event("Epoch", epoch=1, reason="", message="", boundary=False, seconds=seconds / 2)
            else:
                observer.started(name, CELL, 0, 0)
        if name in TIME_USE_OF_SPAN:
            now += seconds
            for observer in (tally, written):
                observer.finished(name, CELL, 0, 0)
        after = tally.seconds()
        assert all(after[kind] >= before[kind] for kind in TimeUse), "a counter fell"
        before = after
    for observer in (tally, written):  # a wait that is not over is in no trace
        observer.started("Forward", CELL, 0, 0)
        observer.finished("Forward", CELL, 0, 0)
        observer.close()
    merge_traces(tmp_path, tmp_path / "merged")
    sums = dict.fromkeys(TimeUse, 0.0)
    for event in json.loads((tmp_path / "merged").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in TIME_USE_OF_SPAN:
            sums[TIME_USE_OF_SPAN[event["cat"]]] += event["dur"] / 1e6
    assert dict(tally.seconds()) == pytest.approx(sums, abs=1e-4)


def test_a_wait_is_counted_while_it_lasts() -> None:
    now = 0.0
    tally = TimeAccount(lambda: now)
    tally.event("Idle")
    now = 7.0
    assert tally.seconds()[TimeUse.IDLE] == 7.0
    tally.started("Backward", CELL, 0, 0)
    now = 9.0
    assert (tally.seconds()[TimeUse.IDLE], tally.seconds()[TimeUse.BACKWARD]) == (7.0, 0.0)
    tally.finished("Backward", CELL, 0, 0)
    assert tally.seconds()[TimeUse.BACKWARD] == 2.0
