"""A Chrome/Perfetto trace of the engine's instructions and waits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from bamboo_core.planning.plan import Cell
from bamboo_trainer.telemetry.spans import Follower, Span

FLUSH_SECONDS = 0.5


class TraceFile(Follower):
    """A trace file with one JSON object and a comma per line; a killed worker loses at most the last half second.

    The worker is a process of the trace, and each cell that it runs or replicates a thread. Waits are spans of the
    category Wait, in the thread of the instruction that ended them; plans in force and takeovers are instants. Times
    are microseconds of the machine's monotonic clock, which all local workers share.
    """

    def __init__(self, path: Path, worker: str, pid: int) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._pid = pid
        self._flushed = 0.0
        self._named: set[Cell] = set()
        self._file.write("[\n")
        self._name("process_name", 0, f"worker {worker}")

    def ended(self, span: Span) -> None:
        args: dict[str, object] = {"for": span.awaited} if span.awaited else {}
        thread = 0
        if span.cell is not None:
            thread = self._thread(span.cell)
            args |= {**span.cell._asdict(), "step": span.step + 1, "microbatch": span.microbatch}
        self._write("X", span.name, span.name, thread, span.begin, dur=_micros(span.end - span.begin), args=args)
        if span.end - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = span.end

    def event(self, name: str, now: float, facts: Mapping[str, Any]) -> None:
        if name == "Epoch":
            self._write("i", f"epoch {facts['epoch']}: {facts['reason']}", name, 0, now, s="p", args=facts)
        else:
            self._take_over(name, now, **facts)

    def _take_over(self, name: str, now: float, cell: Cell, **facts: Any) -> None:
        """Write the instant of a takeover's end, and its two phases, before and after the plan was applied."""
        thread, applied = self._thread(cell), now - facts["recompute_ms"] / 1e3
        args = {"pipeline": cell.pipeline, "stage": cell.stage, **facts, "step": facts["step"] + 1}
        self._write("i", name, name, thread, now, s="p", args=args)
        phases = {"Reform": (applied - facts["reform_ms"] / 1e3, applied), "Recompute": (applied, now)}
        for phase, (begin, end) in phases.items():
            label = f"{self._pid}.{facts['epoch']}.{thread}"
            self._write("b", phase, name, thread, begin, id=label, args=args)
            self._write("e", phase, name, thread, end, id=label)

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
        self._file.close()


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
