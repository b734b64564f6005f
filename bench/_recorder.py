"""Recorders of a worker's instructions (`Recorder`) and of its steps' ends (`StepTimes`). A line of a `Recorder`,
written at once in case of a kill, has name, pipeline, stage, step, microbatch, start and end (monotonic seconds).
"""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker import process
from bamboo_trainer.worker.telemetry import Follower, Span


class Done(NamedTuple):
    """An instruction that a worker has finished. start, end: monotonic seconds."""

    worker: str
    name: str
    cell: Cell
    step: int
    microbatch: int
    start: float
    end: float

    @property
    def what(self) -> tuple[str, Cell, int, int]:
        return self.name, self.cell, self.step, self.microbatch


class Recorder(Follower):
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def ended(self, span: Span) -> None:
        name, cell, step, microbatch, begin, end, awaited = span
        if cell is not None and not awaited:
            line = f"{name} {cell.pipeline} {cell.stage} {step} {microbatch} {begin:.6f} {end:.6f}\n"
            os.write(self._file, line.encode())

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> list[Done]:
    """Return the finished instructions of every worker with a record in the folder, in the order of their ends."""
    found = []
    for path in folder.glob("*.record"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed worker's last line may be cut off
                name, d, s, step, m, start, end = line.split()
                cell = Cell(int(d), int(s))
                found.append(Done(path.stem, name, cell, int(step), int(m), float(start), float(end)))
    return sorted(found, key=lambda done: done.end)


class StepTimes(Follower):
    """A recorder of each step's end in this worker, and of its CPU seconds until then. close() writes the file."""

    def __init__(self, path: str) -> None:
        self._path, self._ends = Path(path), dict[int, tuple[float, float]]()

    def ended(self, span: Span) -> None:
        if span.name == "OptimizerStep":
            self._ends[span.step] = (span.end, time.process_time())

    def close(self) -> None:
        self._path.write_text(json.dumps(self._ends))


def record(*, trace: str, **started: Any) -> int:
    """Run a worker that writes its instructions to `trace`; return its exit code. started: its other arguments."""
    return process.main(**started, follower=Recorder(trace))


def time_steps(*, trace: str, **started: Any) -> int:
    """Run a worker that writes its steps' ends to `trace`; return its exit code. started: its other arguments."""
    return process.main(**started, follower=StepTimes(trace))
