"""A worker that writes down every instruction at once, so that nothing is lost when it is killed.

One line an instruction: name, pipeline, stage, step, microbatch, start and end (the machine's monotonic clock).
"""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from bamboo_core.planning.plan import Cell
from bamboo_trainer.worker.agent import LOCAL_SETTINGS, WorkerSettings
from bamboo_trainer.worker.launch import process


class Done(NamedTuple):
    """An instruction that a worker has finished."""

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


class Recorder:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._started = 0.0

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._started = time.monotonic()

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        line = f"{name} {cell.pipeline} {cell.stage} {step} {microbatch} {self._started:.6f} {time.monotonic():.6f}\n"
        os.write(self._file, line.encode())

    def event(self, name: str, **facts: object) -> None:
        pass

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> list[Done]:
    """What all workers have done, in order of ending."""
    found = []
    for path in folder.glob("*.record"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed worker's last one may be cut off
                name, d, s, step, m, start, end = line.split()
                cell = Cell(int(d), int(s))
                found.append(Done(path.stem, name, cell, int(step), int(m), float(start), float(end)))
    return sorted(found, key=lambda done: done.end)


class StepTimes:
    """Keeps when each step ended here, and the process's CPU time until then; written at the end only."""

    def __init__(self, path: str) -> None:
        self._path, self._ends = Path(path), dict[int, tuple[float, float]]()

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        pass

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        if name == "OptimizerStep":
            self._ends[step] = (time.monotonic(), time.process_time())

    def event(self, name: str, **facts: object) -> None:
        pass

    def close(self) -> None:
        self._path.write_text(json.dumps(self._ends))


def record(*, trace: str, **started: Any) -> int:
    """Run a worker that records every instruction. started: the launcher's other arguments of a worker."""
    return process.main(**started, observer=Recorder(trace))


def time_steps(*, trace: str, settings: WorkerSettings = LOCAL_SETTINGS, **started: Any) -> int:
    """Run a worker that keeps when its steps ended. started: the launcher's other arguments of a worker."""
    return process.main(**started, observer=StepTimes(trace), settings=settings)
