"""The trace: what the workers write, and what `bamboo trace summary` makes of it."""

import io
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.local.trace_files import merge_traces
from bamboo.local.trace_summary import (
    TIME_USE_OF_SPAN,
    TimeUse,
    TraceError,
    parse_trace,
    read_trace,
    show,
    summarize_trace,
    to_json,
    to_text,
)
from bamboo.planning.plan import Cell
from bamboo.planning.schedule import Instruction
from bamboo_trainer.telemetry.trace import IN_ADVANCE, NEVER_AWAITED, TraceFile

CELL = Cell(0, 1)
JOB = """
apiVersion: bamboo.dev/v1alpha1
kind: BambooJob
metadata: {name: small}
spec:
  task: {entrypoint: "bamboo_trainer.models.mlp:build"}
  training: {steps: 100, globalBatchSize: 32, microBatchSize: 8}
  topology: {stages: 2}
"""


def named(pid: int, worker: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"worker {worker}"}}


def span(pid: int, category: str, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": category, "cat": category, "pid": pid, "tid": 1, "ts": start * 1e6, "dur": seconds * 1e6}


def instant(pid: int, category: str, at: float, **args: Any) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": "x", "cat": category, "pid": pid, "tid": 0, "ts": at * 1e6, "args": args}


HAND_MADE = [
    named(7, "w0"),
    named(8, "w10"),
    named(9, "w2"),
    instant(7, "Epoch", 100, epoch=1),
    span(7, "Forward", 101, 3),
    span(7, "Wait", 104, 1.5),
    span(7, "RedundantForward", 105.5, 0.5),
    span(7, "Backward", 106, 2),
    span(7, "ReduceGradients", 108, 0.5),
    span(7, "GatherGradients", 108.5, 0.5),
    span(7, "OptimizerStep", 109, 1),
    span(8, "Wait", 110, 2),
    span(8, "RedundantBackward", 112, 4),
    span(8, "Rehearsal", 116, 2),
    span(8, "ReplicaUpdate", 118, 1),
    span(8, "ReportReady", 119, 1),
    instant(8, "Takeover", 119, epoch=2, pipeline=0, stage=1, step=5, reform_ms=2.5, recompute_ms=40, cell=[0, 1]),
    instant(8, "Move", 119, epoch=3),
]  # fmt: skip


def summary(events: list[dict[str, Any]]):
    return summarize_trace(parse_trace(json.dumps(events).encode(), "trace"))


def write(folder: Path, *, closed: bool = True) -> list[dict[str, Any]]:
    """A worker that waits, works in advance, waits on, and does what it waited for."""
    trace = TraceFile(folder / "w0.json", "w0", 5)
    trace.event("Epoch", epoch=1, reason="Started", message="", boundary=False, seconds=0.0)
    for name in ("Forward", "Idle", "RedundantForward", "ReplicaUpdate", "Backward", "Idle"):
        if name == "Idle":
            trace.event("Idle")
        else:
            trace.started(name, CELL, 3, 2)
            trace.finished(name, CELL, 3, 2)
    trace.event("Epoch", epoch=2, reason="WorkerLost", message="w1", boundary=False, seconds=0.0)
    trace.event("Takeover", epoch=2, cell=CELL, step=3, reform_ms=5.0, recompute_ms=7.0, forwards=1)
    trace.close()
    merge_traces(folder, folder / "merged")
    return json.loads((folder / "merged").read_text())["traceEvents"]


def test_a_worker_writes_its_waits_and_what_they_were_for(tmp_path: Path) -> None:
    spans = [event for event in write(tmp_path) if event["ph"] == "X"]
    assert [(event["name"], event["args"].get("for")) for event in spans] == [
        ("Forward", None),
        ("RedundantForward", None),
        ("Wait", "ReplicaUpdate"),
        ("Wait", "ReplicaUpdate"),
        ("ReplicaUpdate", None),
        ("Wait", "Backward"),
        ("Backward", None),
        ("Wait", None),  # up to the new plan; the file is closed before it is known what for
    ]
    assert spans[5]["args"] == {"for": "Backward", "pipeline": 0, "stage": 1, "step": 3, "microbatch": 2}
    check_disjoint(spans)


def test_plans_and_takeovers_are_instants_and_a_takeover_has_two_phases(tmp_path: Path) -> None:
    events = write(tmp_path)
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "epoch 1: Started",
        "epoch 2: WorkerLost",
        "Takeover",
    ]
    phases = [event for event in events if event["ph"] in "be"]
    assert [(event["ph"], event["name"]) for event in phases] == [
        ("b", "Reform"),
        ("e", "Reform"),
        ("b", "Recompute"),
        ("e", "Recompute"),
    ]
    moments = [event["ts"] for event in phases]
    assert [round((b - a) / 1e3) for a, b in pairwise(moments)] == [5, 0, 7]
    assert len({(event["id"], event["pid"], event["cat"]) for event in phases}) == 1


def test_every_instruction_has_its_kind() -> None:
    instructions = {instruction.__name__ for instruction in get_args(Instruction)}
    assert set(TIME_USE_OF_SPAN) == instructions | NEVER_AWAITED | {"OptimizerStep", "Wait"}
    assert {TIME_USE_OF_SPAN[name] for name in IN_ADVANCE} == {
        TimeUse.REDUNDANT_FORWARD,
        TimeUse.REDUNDANT_BACKWARD,
        TimeUse.REHEARSAL,
    }


@pytest.mark.parametrize(
    ("worker", "wall", "shares", "other", "bubble", "filled", "takeovers"),
    [
        (
            0,
            10.0,
            {"forward": 0.3, "backward": 0.2, "redundant_forward": 0.05, "reduction": 0.1, "optimizer": 0.1,
             "idle": 0.15},
            0.1,
            0.2,
            0.25,
            0,
        ),
        (1, 0.0, None, None, None, None, 0),  # it never had anything to do
        (
            2,
            10.0,
            {"redundant_backward": 0.4, "rehearsal": 0.2, "replica_update": 0.1, "sync_commit": 0.1, "idle": 0.2},
            0.0,
            0.8,
            0.75,
            1,
        ),
        (
            None,
            20.0,
            {"forward": 0.15, "backward": 0.1, "redundant_forward": 0.025, "redundant_backward": 0.2,
             "rehearsal": 0.1, "reduction": 0.05, "sync_commit": 0.05, "optimizer": 0.05, "replica_update": 0.05,
             "idle": 0.175},
            0.05,
            0.5,
            0.65,
            1,
        ),
    ],
)  # fmt: skip
def test_the_shares_of_a_known_trace(
    worker: int | None,
    wall: float,
    shares: dict[str, float] | None,
    other: float | None,
    bubble: float | None,
    filled: float | None,
    takeovers: int,
) -> None:
    """Workers in the order of their numbers; the last row is everybody's."""
    found = summary(HAND_MADE)
    usage = found.overall if worker is None else found.workers[worker]
    assert [u.name for u in found.workers] == ["w0", "w2", "w10"]
    assert usage.wall_seconds == pytest.approx(wall)
    expected = {kind: shares.get(kind, 0.0) if shares is not None else None for kind in TimeUse}
    for kind in TimeUse:
        assert usage.share(kind) == pytest.approx(expected[kind])
    assert usage.other == pytest.approx(other)
    assert (usage.bubble, usage.filled) == (pytest.approx(bubble), pytest.approx(filled))
    assert usage.takeovers == takeovers


def test_the_order_of_events_does_not_matter() -> None:
    assert summary(HAND_MADE[::-1]) == summary(HAND_MADE)


def test_the_summary_as_text_and_json() -> None:
    found = summary(HAND_MADE)
    lines = to_text(found).splitlines()
    assert lines[1].split() == [
        "worker", "wall", "forward", "backward", "forward", "backward", "rehearsal", "reduction", "commit",
        "optimizer", "update", "idle", "other", "bubble", "filled", "takeovers",
    ]  # fmt: skip
    assert lines[2].split() == [
        "w0", "10.00", "s", "30.0%", "20.0%", "5.0%", "0.0%", "0.0%", "10.0%", "0.0%", "10.0%", "0.0%", "15.0%",
        "10.0%", "20.0%", "25.0%", "0",
    ]  # fmt: skip
    assert lines[3].split()[3:-1] == ["-"] * 13
    document = json.loads(to_json(found))
    assert [worker["name"] for worker in document["workers"]] == ["w0", "w2", "w10"]
    assert document["workers"][1]["shares"]["idle"] is None
    assert document["overall"]["bubble_filled_share"] == pytest.approx(0.65)
    assert document["takeovers"] == [
        {"worker": "w10", "epoch": 2, "pipeline": 0, "stage": 1, "step": 5, "reform_ms": 2.5, "recompute_ms": 40.0}
    ]


@pytest.mark.parametrize(("terminal", "width", "boxed"), [(True, 200, True), (True, 80, False), (False, 200, False)])
def test_a_terminal_gets_a_table_if_it_fits(terminal: bool, width: int, boxed: bool) -> None:
    out = io.StringIO()
    show(summary(HAND_MADE), Console(file=out, force_terminal=terminal, width=width))
    assert ("│" in out.getvalue()) == boxed
    assert "w10" in out.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"hello", "wrote: JSON is malformed"),
        (b'{"traceEvents": [{"ph": "X", "pid": 1', "wrote: Input data was truncated"),
        (b'{"a": 1}', "missing required field `traceEvents`"),
        (b"[]", "no instruction is in it"),
        (b'[{"ph": "X", "pid": 1, "cat": "cpu_op", "ts": 1}]', "no instruction is in it"),
        (b'[{"ph": "X", "pid": 1, "cat": "Forward", "ts": "now"}]', "Expected `float`, got `str` - at `$[0].ts`"),
        (b'[{"ph": "X", "pid": 1, "cat": "Forward", "dur": -1}]', "Expected `float` >= 0.0 - at `$[0].dur`"),
        (b'[{"ph": "X", "pid": 1, "cat": "\xff"}]', "expected a trace that `bamboo run --trace` wrote"),
    ],
)
def test_a_file_that_is_no_trace_gets_one_sentence(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["trace", "summary", str(path)])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1), result.output
    assert result.output.startswith(f"bamboo: {path}: ")
    assert said in result.output


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "summary", str(tmp_path)])
    assert (result.exit_code, result.output) == (2, f"bamboo: {tmp_path}: Is a directory\n")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse
    with pytest.raises(TraceError, match="expected a trace of at most 512 MiB"):
        read_trace(path)


def check_disjoint(spans: list[dict[str, Any]]) -> None:
    """A worker does one thing at a time, and waits only when it does nothing."""
    by_worker = defaultdict(list)
    for event in spans:
        by_worker[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in by_worker.values():
        times.sort()
        assert all(end <= begin + 0.3 for (_, end), (begin, _) in pairwise(times))  # rounding


def test_a_run_is_traced_and_its_trace_summarised(tmp_path: Path) -> None:
    job, path = tmp_path / "job.yaml", tmp_path / "trace.json"
    job.write_text(JOB)
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(job), "--quiet", "--trace", str(path), "--preempt", "at:10:1"])
    assert ran.exit_code == 0, ran.output
    events = json.loads(path.read_text())["traceEvents"]
    check_disjoint([event for event in events if event["ph"] == "X"])
    waited_for = {event["args"].get("for") for event in events if event["name"] == "Wait"}
    assert {"Forward", "Backward", "OptimizerStep"} <= waited_for
    assert any(event["name"] == "epoch 1: Started" for event in events)
    result = runner.invoke(app, ["trace", "summary", str(path), "--json"])
    document = json.loads(result.stdout)
    assert [worker["name"] for worker in document["workers"]][:2] == ["w0", "w1"]  # and who came in place of w1
    assert [(t["worker"], t["stage"]) for t in document["takeovers"]] == [("w0", 1)]
    trained = [*document["workers"][:2], document["overall"]]
    assert all(usage["shares"]["idle"] > 0 for usage in trained)
    late = [usage for usage in document["workers"][2:] if usage["wall_seconds"] > 0]  # the others came at the very end
    for usage in (*trained, *late):
        assert sum(usage["shares"].values()) == pytest.approx(1, abs=0.01)
    for kind in ("forward", "backward", "sync_commit", "optimizer", "replica_update"):
        assert document["overall"]["shares"][kind] > 0
