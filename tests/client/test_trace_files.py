"""The workers' trace files as one."""

import json
from pathlib import Path

from bamboo.local.trace_files import merge_traces
from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.telemetry import Spans, TraceFile


def test_a_trace_names_its_processes_and_threads(tmp_path: Path) -> None:
    for pid, worker in enumerate(("w0", "w1")):
        trace = Spans(TraceFile(tmp_path / f"{worker}.json", worker, pid))
        for step in range(2):
            trace.started("Forward", Cell(pid, 1), step, 0)
            trace.finished("Forward", Cell(pid, 1), step, 0)
        trace.close()
    merge_traces(tmp_path, tmp_path / "out")
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    names = [(e["pid"], e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (0, "process_name", "worker w0"),
        (0, "thread_name", "pipeline 0 stage 1"),
        (1, "process_name", "worker w1"),
        (1, "thread_name", "pipeline 1 stage 1"),
    ]
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert [(e["pid"], e["tid"]) in threads for e in events if e["ph"] == "X"] == [True] * 4


def test_traces_are_merged_without_the_torn_line(tmp_path: Path) -> None:
    (tmp_path / "w0.json").write_text('[\n{"name": "a"},\n{"name": "b"},\n{"na')
    (tmp_path / "w1.json").write_text('[\n{"name": "c"}\n]\n')
    target = tmp_path / "out" / "trace"
    target.parent.mkdir()
    merge_traces(tmp_path, target)
    assert [e["name"] for e in json.loads(target.read_text())["traceEvents"]] == ["a", "b", "c"]
