"""`bamboo trace summary`: what the workers spent their time on."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.local.trace_summary import (
    TimeUse,
    TraceError,
    parse_trace,
    read_trace,
    show,
    summarize_trace,
    to_json,
    to_text,
)


def summary(events: list[dict[str, Any]]):
    return summarize_trace(parse_trace(json.dumps(events).encode(), "trace"))


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
]


@pytest.mark.parametrize(
    ("worker", "wall", "shares", "other", "bubble", "filled", "takeovers"),
    [
        (
            0,
            10.0,
            {
                "forward": 0.3,
                "backward": 0.2,
                "redundant_forward": 0.05,
                "reduction": 0.1,
                "optimizer": 0.1,
                "idle": 0.15,
            },
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
            {
                "forward": 0.15,
                "backward": 0.1,
                "redundant_forward": 0.025,
                "redundant_backward": 0.2,
                "rehearsal": 0.1,
                "reduction": 0.05,
                "sync_commit": 0.05,
                "optimizer": 0.05,
                "replica_update": 0.05,
                "idle": 0.175,
            },
            0.05,
            0.5,
            0.65,
            1,
        ),
    ],
)
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
        "worker",
        "wall",
        "forward",
        "backward",
        "forward",
        "backward",
        "rehearsal",
        "reduction",
        "commit",
        "optimizer",
        "update",
        "idle",
        "other",
        "bubble",
        "filled",
        "takeovers",
    ]
    assert lines[2].split() == [
        "w0",
        "10.00",
        "s",
        "30.0%",
        "20.0%",
        "5.0%",
        "0.0%",
        "0.0%",
        "10.0%",
        "0.0%",
        "10.0%",
        "0.0%",
        "15.0%",
        "10.0%",
        "20.0%",
        "25.0%",
        "0",
    ]
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
