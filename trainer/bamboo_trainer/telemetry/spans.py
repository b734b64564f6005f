"""Spans of time in which the engine's thread works or waits: one stream for traces, metrics and heartbeats."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell

# These fill a wait; the awaited instruction comes after them.
IN_ADVANCE: Final = {"Rehearsal", "SpotCheck"}
NEVER_AWAITED: Final = IN_ADVANCE | {"ReplicaUpdate"}  # after these the worker is still idle
FIRST_CALLS: Final = {"Rehearsal"}  # their durations are not typical


class Span(NamedTuple):
    """An instruction, or a wait for one, at the instruction's place.

    cell: None if a wait's instruction is unknown. awaited: for a wait, the name of the instruction. begin, end: seconds
    of the clock; end is 0 while it goes on.
    """

    name: str
    cell: Cell | None
    step: int
    microbatch: int
    begin: float
    end: float = 0.0
    awaited: str = ""


class Follower:
    """A follower of the stream; subclasses override what they need. Called only by the engine's thread."""

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        """Note that an instruction is about to begin."""

    def ended(self, span: Span) -> None:
        """Note that an instruction, or before it a wait for it, has ended."""

    def event(self, name: str, now: float, facts: Mapping[str, Any]) -> None:
        """Note an Epoch, a Takeover or a Move. See `Observer`."""

    def close(self) -> None:
        """End with the worker."""


class Spans:
    """The engine's observer, which adds up the use of time: plain numbers, no locks, a few additions at each call."""

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
        """Return the instruction in progress in words and its seconds so far, or "" and 0. Any thread may call.

        A data set that hangs or a kernel that never ends blocks the engine's thread, but not the heartbeats.
        """
        span = self._current
        if span is None or span.cell is None or span.name in FIRST_CALLS:
            return "", 0.0
        where = f"stage {span.cell.stage} of pipeline {span.cell.pipeline}"
        text = f"inside {span.name} for {where}, step {span.step + 1}, microbatch {span.microbatch}"
        return text, max(0.0, self._clock() - span.begin)

    def seconds(self) -> Mapping[TimeUse, float]:
        """Return the seconds by kind, including the wait in progress, for one other thread.

        They never fall, although they are read while the engine writes.
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
