"""Spans of a worker's time, and torch.profiler in chosen steps."""

import gzip
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.telemetry import Follower, Span, Spans, StepProfiler
from manifest_kit import bamboojob, gpt_task, training

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


def steps(profiler: Spans, *which: int) -> None:
    """Run instructions of these steps, each followed by a repetition of the step before."""
    for step in which:
        for name, at in (("Forward", step), ("Backward", step), ("Forward", step - 1)):
            profiler.started(name, CELL, at, 0)
            torch.ones(3) + 1.0
            profiler.finished(name, CELL, at, 0)
        profiler.event("Idle")


def spans(file: Path) -> list[str]:
    document: Mapping[str, list[dict[str, str]]] = json.loads(gzip.decompress(file.read_bytes()))
    return [one["name"] for one in document["traceEvents"] if one.get("cat") == "user_annotation"]


def test_each_chosen_step_is_a_file_with_its_instructions(tmp_path: Path) -> None:
    profiler = Spans(StepProfiler.of("w2", f"3:4:{tmp_path}/p"))
    steps(profiler, 0, 1, 2, 3, 4)
    profiler.close()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "w2.3.pt.trace.json.gz",
        "w2.4.pt.trace.json.gz",
    ]
    found = spans(tmp_path / "p" / "w2.4.pt.trace.json.gz")
    assert "ProfilerStep#4" in found
    assert "Backward for stage 2 of pipeline 1, step 4, microbatch 0" in found
    assert not any("step 5" in name for name in found)


def test_a_step_in_progress_is_written_at_the_end(tmp_path: Path) -> None:
    profiler = Spans(StepProfiler("w", 2, 5, tmp_path))
    steps(profiler, 0, 1)
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["w.2.pt.trace.json.gz"]


def test_what_cannot_be_recorded_or_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        profiler = Spans(StepProfiler("w", 1, 3, tmp_path / "file"))
        steps(profiler, 0, 1, 2)
        profiler.close()
        other = Spans(StepProfiler("w", 1, 3, tmp_path))
        with torch.profiler.profile(acc_events=True):
            steps(other, 0, 1)
    said = [record.message for record in caplog.records if record.name.endswith("telemetry")]
    assert [text.split(": ")[:2] for text in said] == [
        ["torch.profiler gives up", "FileExistsError"],
        ["torch.profiler gives up", "RuntimeError"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_with_a_profiler_trains_the_same_bits(tmp_path: Path) -> None:
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(json.dumps(bamboojob(task=gpt_task(blocks=2), training=training(5, 8, 2), topology={"stages": 2})))
    command = [sys.executable, "-m", "bamboo", "run", str(job), "--profile", "2:3", "--output", str(out), "--verify"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bit_equal"] is True
    names = {path.name.removesuffix(".pt.trace.json.gz") for path in (out / "profiler").iterdir()}
    assert names == {f"w{worker}.{step}" for worker in (0, 1) for step in (2, 3)}
