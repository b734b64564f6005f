"""Observers of the engine: none, or a Chrome/Perfetto trace of what it did and of when it had nothing to do."""

import json
import time
from pathlib import Path
from typing import Any, TextIO

from bamboo_core.planning.plan import Cell

FLUSH_SECONDS = 0.5
# These fill a wait; what is waited for comes after them.
IN_ADVANCE = {"Rehearsal", "SpotCheck"}
NEVER_AWAITED = IN_ADVANCE | {"ReplicaUpdate"}  # after these the worker is as idle as before


class Silent:
    """Observes nothing."""

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        pass

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        pass

    def event(self, name: str, **facts: object) -> None:
        pass

    def close(self) -> None:
        pass


class TraceFile:
    """Appends events (one JSON object and a comma a line); a killed worker loses at most the last half second.

    The worker is a process of the trace, every cell that it runs or shadows a thread of it. Waits are spans of the
    category Wait, in the thread of the instruction that ended them; plans in force and takeovers are instants.
    Times are microseconds of the machine's monotonic clock, which all local workers share.
    """

    def __init__(self, path: Path, worker: str, pid: int) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._pid = pid
        self._started = 0.0
        self._flushed = time.monotonic()
        self._named: set[Cell] = set()
        self._idle_since: float | None = None
        self._waits: list[tuple[float, float]] = []  # start and end; what they were for is not known yet
        self._file.write("[\n")
        self._name("process_name", 0, f"worker {worker}")

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._started = time.monotonic()
        self._wait_until(self._started)

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        now, thread = time.monotonic(), self._thread(cell)
        args = {"pipeline": cell.pipeline, "stage": cell.stage, "step": step + 1, "microbatch": microbatch}
        if name not in IN_ADVANCE:
            self._write_waits(thread, {"for": name, **args})
        self._write("X", name, name, thread, self._started, dur=_micros(now - self._started), args=args)
        self._idle_since = now if self._idle_since is not None and name in NEVER_AWAITED else None
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def event(self, name: str, **facts: Any) -> None:
        now = time.monotonic()
        match name:
            case "Idle":
                self._idle_since = now
            case "Epoch":
                if self._idle_since is not None:  # to obey a plan is no wait
                    self._wait_until(max(self._idle_since, now - facts["seconds"]))
                    self._idle_since = now
                self._write("i", f"epoch {facts['epoch']}: {facts['reason']}", name, 0, now, s="p", args=facts)
            case _:
                self._take_over(name, now, **facts)

    def _take_over(self, name: str, now: float, cell: Cell, **facts: Any) -> None:
        """An instant when it is over, and both of its phases: up to the plan being applied, and from then on."""
        thread, applied = self._thread(cell), now - facts["recompute_ms"] / 1e3
        args = {"pipeline": cell.pipeline, "stage": cell.stage, **facts, "step": facts["step"] + 1}
        self._write("i", name, name, thread, now, s="p", args=args)
        phases = {"Reform": (applied - facts["reform_ms"] / 1e3, applied), "Recompute": (applied, now)}
        for phase, (begin, end) in phases.items():
            label = f"{self._pid}.{facts['epoch']}.{thread}"
            self._write("b", phase, name, thread, begin, id=label, args=args)
            self._write("e", phase, name, thread, end, id=label)

    def _wait_until(self, now: float) -> None:
        if self._idle_since is not None:
            self._waits.append((self._idle_since, now))

    def _write_waits(self, thread: int, args: dict[str, object]) -> None:
        for begin, end in self._waits:
            self._write("X", "Wait", "Wait", thread, begin, dur=_micros(end - begin), args=args)
        self._waits.clear()

    def _thread(self, cell: Cell) -> int:
        thread = cell.pipeline * 1000 + cell.stage + 1
        if cell not in self._named:
            self._named.add(cell)
            self._name("thread_name", thread, f"pipeline {cell.pipeline} stage {cell.stage}")
        return thread

    def _name(self, what: str, thread: int, name: str) -> None:
        self._line({"name": what, "ph": "M", "pid": self._pid, "tid": thread, "args": {"name": name}})

    def _write(self, phase: str, name: str, category: str, thread: int, at: float, **more: object) -> None:
        event = {"name": name, "cat": category, "ph": phase, "pid": self._pid, "tid": thread, "ts": _micros(at)}
        self._line({**event, **more})

    def _line(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        self._write_waits(0, {})
        self._file.close()


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
