"""Spans of a worker's time: sums for metrics, and a timeline (Chrome trace)."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell

# Instructions that fill a wait; the awaited instruction comes after them.
IN_ADVANCE: Final = {"Rehearsal", "SpotCheck"}
NEVER_AWAITED: Final = IN_ADVANCE | {"ReplicaUpdate"}  # after these the worker is still idle
FIRST_CALLS: Final = {"Rehearsal"}  # their durations are not typical


class Span(NamedTuple):
    """An instruction, or the wait before it. cell: None if a wait's instruction is unknown. awaited: for a wait, the
    name of the instruction. begin, end: seconds of the clock; end is 0 for an instruction in progress.
    """

    name: str
    cell: Cell | None
    step: int
    microbatch: int
    begin: float
    end: float = 0.0
    awaited: str = ""


class Follower:
    """A follower of a worker's spans; subclasses override the methods that they need. Only the engine's thread calls
    it.
    """

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        """Note that an instruction is about to begin."""

    def ended(self, span: Span) -> None:
        """Note that an instruction, or a wait for one, has ended."""

    def event(self, name: str, now: float, facts: Mapping[str, Any]) -> None:
        """Note an Epoch, a Takeover or a Move. See `Observer`."""

    def close(self) -> None:
        """Release this follower's resources at the worker's end."""


class Spans:
    """The engine's observer, which adds up the seconds of each use of time, and passes spans to followers."""

    def __init__(self, *followers: Follower, clock: Callable[[], float] = time.monotonic) -> None:
        self._followers, self._clock = followers, clock
        self._current: Span | None = None
        self._idle_since: float | None = None
        self._was_idle = False
        self._waits: list[tuple[float, float]] = []  # begin and end of waits whose instruction is not known yet
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._reported = dict.fromkeys(TimeUse, 0.0)

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        for follower in self._followers:
            follower.begins(name, cell, step, microbatch)
        now = self._clock()
        self._was_idle = self._idle_since is not None
        self._wait_until(now)
        self._idle_since = None
        self._current = Span(name, cell, step, microbatch, now)

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        now, span = self._clock(), self._current
        assert span is not None
        self._current = None
        if (kind := TIME_USE_OF_SPAN.get(name)) is not None:
            self._seconds[kind] += now - span.begin
        self._idle_since = now if self._was_idle and name in NEVER_AWAITED else None
        if name not in IN_ADVANCE:
            self._tell_waits(span)
        for follower in self._followers:
            follower.ended(span._replace(end=now))

    def event(self, name: str, **facts: Any) -> None:
        now = self._clock()
        if name == "Idle":
            self._idle_since = now
            return
        if name == "Epoch" and self._idle_since is not None:  # obeying a plan is no wait
            self._wait_until(max(self._idle_since, now - facts["seconds"]))
            self._idle_since = now
        for follower in self._followers:
            follower.event(name, now, facts)

    def close(self) -> None:
        self._tell_waits(None)
        for follower in self._followers:
            follower.close()

    def now(self) -> tuple[str, float]:
        """Return the instruction in progress in words, and its seconds so far; "" and 0 for none or a rehearsal.

        A hanging dataset or kernel blocks the engine's thread, but not the heartbeats: any thread may call this.
        """
        span = self._current
        if span is None or span.cell is None or span.name in FIRST_CALLS:
            return "", 0.0
        where = f"stage {span.cell.stage} of pipeline {span.cell.pipeline}"
        text = f"inside {span.name} for {where}, step {span.step + 1}, microbatch {span.microbatch}"
        return text, max(0.0, self._clock() - span.begin)

    def seconds(self) -> Mapping[TimeUse, float]:
        """Return the seconds of each use of time, including the wait in progress. The numbers never fall, although
        another thread reads them while the engine writes.
        """
        seconds, since = dict(self._seconds), self._idle_since
        if since is not None:
            seconds[TimeUse.IDLE] += max(0.0, self._clock() - since)
        self._reported = {kind: max(reported, seconds[kind]) for kind, reported in self._reported.items()}
        return self._reported

    def _wait_until(self, now: float) -> None:
        if self._idle_since is not None:
            self._seconds[TimeUse.IDLE] += now - self._idle_since
            self._waits.append((self._idle_since, now))

    def _tell_waits(self, awaited: Span | None) -> None:
        place = (awaited.cell, awaited.step, awaited.microbatch) if awaited else (None, 0, 0)
        for begin, end in self._waits:
            wait = Span("Wait", *place, begin, end, awaited.name if awaited else "")
            for follower in self._followers:
                follower.ended(wait)
        self._waits.clear()


FLUSH_SECONDS = 0.5


class TraceFile(Follower):
    """A worker's timeline in Chrome's trace event format, for Perfetto. It has one JSON object and a comma per line,
    without the closing bracket, so a killed worker loses at most half a second of ended spans.

    The worker is a process of the trace, and each cell that it runs or replicates a thread. Waits are spans of the
    category Wait, in the thread of the instruction that ended them; plans, takeovers and moves are instants. Times are
    microseconds of the machine's monotonic clock, which all local workers share.
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
        """Write the instant at which a takeover or move ended, and its phases before and after the plan was applied."""
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
