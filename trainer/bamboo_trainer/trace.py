"""Observers of the engine: none, or a Chrome/Perfetto trace of what it did."""

import json
import time
from pathlib import Path
from typing import TextIO

from bamboo.plan import Cell

FLUSH_SECONDS = 0.5


class Silent:
    """Observes nothing."""

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        pass

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        pass

    def close(self) -> None:
        pass


class TraceFile:
    """Appends complete events (one JSON object and a comma a line); a killed worker loses at most the last half second.

    The worker is a process of the trace, every cell that it runs a thread of it.
    Times are microseconds of the machine's monotonic clock, which all local workers share.
    """

    def __init__(self, path: Path, worker: str, pid: int) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._pid = pid
        self._started = 0.0
        self._flushed = time.monotonic()
        self._named: set[Cell] = set()
        self._file.write("[\n")
        self._name("process_name", 0, f"worker {worker}")

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._started = time.monotonic()

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        now = time.monotonic()
        thread = cell.pipeline * 1000 + cell.stage + 1
        if cell not in self._named:
            self._named.add(cell)
            self._name("thread_name", thread, f"pipeline {cell.pipeline} stage {cell.stage}")
        self._write(
            {
                "name": name,
                "cat": name,
                "ph": "X",
                "pid": self._pid,
                "tid": thread,
                "ts": round(self._started * 1e6, 1),
                "dur": round((now - self._started) * 1e6, 1),
                "args": {"pipeline": cell.pipeline, "stage": cell.stage, "step": step, "microbatch": microbatch},
            }
        )
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def _name(self, what: str, thread: int, name: str) -> None:
        self._write({"name": what, "ph": "M", "pid": self._pid, "tid": thread, "args": {"name": name}})

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        self._file.close()
