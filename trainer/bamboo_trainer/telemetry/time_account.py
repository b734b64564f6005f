"""Adds up what this worker's time goes to, for its metrics: plain numbers, no locks, a few additions an instruction.

The engine's thread writes, the thread that is scraped reads. The sums are those of the trace's spans.
"""

import time
from collections.abc import Callable, Mapping

from bamboo_core.metrics.time_use import TIME_USE_OF_SPAN, TimeUse
from bamboo_core.planning.plan import Cell
from bamboo_trainer.telemetry.trace import NEVER_AWAITED


class TimeAccount:
    """An observer of the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._told = dict.fromkeys(TimeUse, 0.0)
        self._started = 0.0
        self._idle_since: float | None = None
        self._was_idle = False

    def started(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        self._started = self._clock()
        self._was_idle = self._idle_since is not None
        self._wait_until(self._started)
        self._idle_since = None

    def finished(self, name: str, cell: Cell, step: int, microbatch: int) -> None:
        now = self._clock()
        if (kind := TIME_USE_OF_SPAN.get(name)) is not None:
            self._seconds[kind] += now - self._started
        self._idle_since = now if self._was_idle and name in NEVER_AWAITED else None

    def event(self, name: str, **facts: object) -> None:
        now = self._clock()
        if name == "Idle":
            self._idle_since = now
        elif name == "Epoch" and self._idle_since is not None:  # to obey a plan is no wait
            seconds = facts["seconds"]
            assert isinstance(seconds, float)
            self._wait_until(max(self._idle_since, now - seconds))
            self._idle_since = now

    def close(self) -> None:
        pass

    def seconds(self) -> Mapping[TimeUse, float]:
        """The seconds by kind, the wait in progress included. None ever falls, though they are read while the engine
        writes.
        """
        found, since = dict(self._seconds), self._idle_since
        if since is not None:
            found[TimeUse.IDLE] += max(0.0, self._clock() - since)
        self._told = {kind: max(told, found[kind]) for kind, told in self._told.items()}
        return self._told

    def _wait_until(self, now: float) -> None:
        if self._idle_since is not None:
            self._seconds[TimeUse.IDLE] += now - self._idle_since
