"""A `bamboo run` of a job whose layers sleep and whose nodes come and go, and its figures, read from the history."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from _common import HERE, busy_seconds, say
from bamboo.traces.trace import Change, NodeChange, Trace, make_trace
from bamboo_core.history.records import EventRecord, StepRecord
from bamboo_core.planning.splits.resplit_plans import Grid

LAYERS, MICROBATCHES = 10, 12
FORWARD_MS, BACKWARD_MS = 8.0, 16.0  # of a layer
FEWEST_STAGES = 2
NOTICE_SECONDS = 10.0
APART_SECONDS = 4.0  # between two losses, so that copies are in sync again
LATER_SECONDS = 0.5  # a replacement comes later than the loss, or no worker would be taken


def grid_job(steps: int, grid: Grid | None, workers: int) -> dict[str, Any]:
    """Return the manifest of a job with sleeping layers. grid: None if the coordinator chooses it for `workers`."""
    document: dict[str, Any] = {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "grids"},
        "spec": {
            "task": {
                "entrypoint": "_emulated:build",
                "config": {"layers": LAYERS, "forwardMs": FORWARD_MS, "backwardMs": BACKWARD_MS},
            },
            "training": {"steps": steps, "globalBatchSize": MICROBATCHES, "microBatchSize": 1, "seed": 0},
            "topology": {"schedule": "1F1B"},
        },
    }
    if grid is None:
        document["spec"]["elastic"] = {"minStages": FEWEST_STAGES, "maxWorkers": workers, "stabilizationSeconds": 2}
    else:
        document["spec"]["topology"] |= {"stages": grid.stages, "pipelines": grid.pipelines}
    return document


def nodes_of(counts: Sequence[int], seconds: float, *, notice: bool = False) -> Trace:
    """Return a trace that holds each count of nodes for `seconds`. If a count is repeated, one node is replaced without
    notice. notice: whether nodes get notice when the count falls.
    """
    changes: list[NodeChange] = []
    live: list[str] = []
    made = 0
    for number, count in enumerate(counts):
        at = number * seconds
        if number and count == counts[number - 1]:
            changes.append(NodeChange(at=at, change=Change.REMOVE, node=live.pop()))
            at += LATER_SECONDS
        while len(live) < count:
            live.append(f"n{made}")
            made += 1
            changes.append(NodeChange(at=at, change=Change.ADD, node=live[-1]))
        while len(live) > count:
            gone = live.pop()
            moment, grace = (at + NOTICE_SECONDS, NOTICE_SECONDS) if notice else (at, None)
            at += APART_SECONDS
            changes.append(NodeChange(at=moment, change=Change.REMOVE, node=gone, notice=grace))
    return make_trace(changes, duration=len(counts) * seconds)


def as_json_lines(trace: Trace) -> str:
    lines: list[dict[str, Any]] = [{"format": "bamboo-trace", "version": 1, "duration": trace.duration}]
    for change in trace.changes:
        line: dict[str, Any] = {"at": change.at, str(change.change): change.node}
        lines.append(line if change.notice is None else {**line, "notice": change.notice})
    return "".join(json.dumps(line) + "\n" for line in lines)


@dataclass(frozen=True, slots=True)
class GridRun:
    """The figures of a completed run. Times are in seconds since training began."""

    ends: Sequence[float]  # of its steps
    events: Sequence[tuple[float, str, str]]  # time, reason, message
    others: float  # mean cores that other processes used meanwhile

    @property
    def choices(self) -> list[str]:
        """The messages of the coordinator's GridChosen events."""
        return [text for _, reason, text in self.events if reason == "GridChosen"]


async def bamboo_run(folder: Path, document: Mapping[str, Any], nodes: Trace) -> GridRun:
    """Run a job with `bamboo run`; return its figures. Raises RuntimeError if it fails. folder: created here."""
    folder.mkdir()
    job, output = folder / "job.yaml", folder / "output"
    job.write_text(yaml.safe_dump(dict(document)))
    (folder / "nodes.jsonl").write_text(as_json_lines(nodes))
    flags = ["run", str(job), "--output", str(output), "--preempt", f"nodes:{folder / 'nodes.jsonl'}"]
    began, busy, own = time.monotonic(), busy_seconds(), ended_seconds()
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("bamboo")),
        *flags,
        cwd=HERE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"bamboo run ended with {process.returncode}: {complaints.decode()[-2000:]}")
    others = (busy_seconds() - busy - ended_seconds() + own) / (time.monotonic() - began)
    run = _read(output, others)
    say(f"{len(run.ends)} steps in {run.ends[-1]:.0f} s")
    return run


def ended_seconds() -> float:
    """Return the CPU seconds of this process's ended children, and of their ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(output: Path, others: float) -> GridRun:
    lines = (output / "history.jsonl").read_text().splitlines()[1:]
    decoder = msgspec.json.Decoder(StepRecord | EventRecord)
    records = [decoder.decode(line) for line in lines]
    began = next(r.time for r in records if isinstance(r, EventRecord) and r.reason == "Started")
    steps = [r for r in records if isinstance(r, StepRecord)]
    return GridRun(
        ends=[step.time - began for step in sorted(steps, key=lambda step: step.step)],
        events=[(r.time - began, r.reason, r.message) for r in records if isinstance(r, EventRecord)],
        others=round(others, 2),
    )
