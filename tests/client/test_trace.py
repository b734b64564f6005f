"""Traces of workers: waits, plans and takeovers."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo.local.trace_files import merge_traces
from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.telemetry import Spans, TraceFile
from manifest_kit import bamboojob, training

CELL = Cell(0, 1)


def write(folder: Path) -> list[dict[str, Any]]:
    """Write the trace of a worker that waits, rehearses, and goes on; return its events."""
    trace = Spans(TraceFile(folder / "w0.json", "w0", 5))
    trace.event("Epoch", epoch=1, reason="Started", message="", boundary=False, seconds=0.0)
    for name in ("Forward", "Idle", "Rehearsal", "ReplicaUpdate", "Backward", "Idle"):
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
        ("Rehearsal", None),
        ("Wait", "ReplicaUpdate"),
        ("Wait", "ReplicaUpdate"),
        ("ReplicaUpdate", None),
        ("Wait", "Backward"),
        ("Backward", None),
        ("Wait", None),  # up to the new plan; the file is closed before it is known what for
    ]
    assert spans[5]["args"] == {"for": "Backward", "pipeline": 0, "stage": 1, "step": 4, "microbatch": 2}
    check_disjoint(spans)


def check_disjoint(spans: list[dict[str, Any]]) -> None:
    """Check that the spans of a worker do not overlap."""
    by_worker = defaultdict(list)
    for event in spans:
        by_worker[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in by_worker.values():
        times.sort()
        assert all(end <= begin + 0.3 for (_, end), (begin, _) in pairwise(times))  # rounding


def test_a_run_is_traced_with_its_takeover_and_what_time_went_to(tmp_path: Path) -> None:
    job, path = tmp_path / "job.yaml", tmp_path / "trace.json"
    task = {"entrypoint": "bamboo_trainer.models.mlp:build"}
    job.write_text(yaml.safe_dump(bamboojob(task=task, training=training(100, 32, 8), topology={"stages": 2})))
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(job), "--quiet", "--trace", str(path), "--preempt", "at:10:1"])
    assert ran.exit_code == 0, ran.output
    events = json.loads(path.read_text())["traceEvents"]
    check_disjoint([event for event in events if event["ph"] == "X"])
    waited_for = {event["args"].get("for") for event in events if event["name"] == "Wait"}
    assert {"Forward", "Backward", "OptimizerStep"} <= waited_for
    assert any(event["name"] == "epoch 1: Started" for event in events)
    seconds = dict.fromkeys(TimeUse, 0.0)
    for event in events:
        if event["ph"] == "X" and event["cat"] in TIME_USE_OF_SPAN:
            seconds[TIME_USE_OF_SPAN[event["cat"]]] += event["dur"] / 1e6
    for kind in ("idle", "forward", "backward", "sync_commit", "optimizer", "replica_update"):
        assert seconds[TimeUse(kind)] > 0
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    taken = [event for event in events if event["name"] == "Takeover"]
    assert [(names[event["pid"]], event["args"]["stage"]) for event in taken] == [("worker w0", 1)]
