"""What the engine's thread does and waits for, as spans of time: one stream for traces, metrics and heartbeats."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell

# These fill a wait; what is waited for comes after them.
IN_ADVANCE: Final = {"Rehearsal", "SpotCheck"}
NEVER_AWAITED: Final = IN_ADVANCE | {"ReplicaUpdate"}  # after these the worker is as idle as before
FIRST_CALLS: Final = {"Rehearsal"}  # what they take says nothing


class Span(NamedTuple):
    """An instruction, or a wait for one, which has its place. cell: None if it is not known what a wait was for.
    awaited: of a wait, the name of the instruction. begin, end: seconds of the clock; end is 0 while it goes on.
    """

    name: str
    cell: Cell | None
    step: int
    microbatch: int
    begin: float
    end: float = 0.0
    awaited: str = ""


class Follower:
    """Follows the stream; a subclass overrides what it needs. All is called by the engine's thread."""

    def begins(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        """An instruction is about to begin."""

    def ended(self, span: Span) -> None:
        """An instruction has ended; the waits for it come first."""

    def event(self, name: str, now: float, facts: Mapping[str, Any]) -> None:
        """Epoch, Takeover or Move. See `Observer`."""

    def close(self) -> None:
        """The worker ends."""


class Spans:
    """The engine's observer. Adds up what the time goes to: plain numbers, no locks, a few additions an instruction."""

    def __init__(self, *followers: Follower, clock: Callable[[], float] = time.monotonic) -> None:
        self._followers, self._clock = followers, clock
        self._current: Span | None = None
        self._idle_since: float | None = None
        self._was_idle = False
        self._waits: list[tuple[float, float]] = []  # begin and end; what they were for is not known yet
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._told = dict.fromkeys(TimeUse, 0.0)

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
        if name == "Epoch" and self._idle_since is not None:  # to obey a plan is no wait
            self._wait_until(max(self._idle_since, now - facts["seconds"]))
            self._idle_since = now
        for follower in self._followers:
            follower.event(name, now, facts)

    def close(self) -> None:
        self._tell_waits(None)
        for follower in self._followers:
            follower.close()

    def now(self) -> tuple[str, float]:
        """The instruction in progress in words, and its seconds so far; nothing and 0 if none is. Any thread may ask.

        A dataset that hangs, or a kernel that never ends, holds up the engine's thread and not the heartbeats.
        """
        span = self._current
        if span is None or span.cell is None or span.name in FIRST_CALLS:
            return "", 0.0
        where = f"stage {span.cell.stage} of pipeline {span.cell.pipeline}"
        text = f"inside {span.name} for {where}, step {span.step + 1}, microbatch {span.microbatch}"
        return text, max(0.0, self._clock() - span.begin)

    def seconds(self) -> Mapping[TimeUse, float]:
        """The seconds by kind, the wait in progress included; one other thread may ask. None ever falls, though they
        are read while the engine writes.
        """
        found, since = dict(self._seconds), self._idle_since
        if since is not None:
            found[TimeUse.IDLE] += max(0.0, self._clock() - since)
        self._told = {kind: max(told, found[kind]) for kind, told in self._told.items()}
        return self._told

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
