"""An asyncio event loop in virtual time: its clock jumps to the next scheduled callback instead of waiting."""

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

from bamboo_core.coordinator.awake_clock import AwakeClock
from bamboo_operator.jobs import coordinator_runner
from bamboo_operator.kube import objects

EPOCH = datetime(2026, 3, 1, tzinfo=UTC)


class _Jumping(selectors.SelectSelector):
    """A selector that advances the virtual clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is planned")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. grid: timers run only at multiples of this number of seconds; 0: at any time."""

    def __init__(self, grid: float) -> None:
        self._jumping, self._grid, self._calls = _Jumping(), grid, count()
        super().__init__(self._jumping)
        self._clock_resolution = max(1e-9, grid / 10)  # within which asyncio does all in one turn

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Schedule a callback. Callbacks of the same time run in the order in which they were scheduled, which
        asyncio's heap does not promise.
        """
        on_grid = math.ceil(when / self._grid - 1e-3) * self._grid if self._grid else when
        return super().call_at(on_grid + next(self._calls) * 1e-10, callback, *arguments, context=context)

    def time(self) -> float:
        return self._jumping.now

    def date(self) -> datetime:
        return EPOCH + timedelta(seconds=self.time())


class LoopClock:
    """A clock for simulated workers that schedules on a virtual loop; it replaces sim_clock.Clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @property
    def now(self) -> float:
        return self._loop.time()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._loop.call_at(max(when, self.now), action)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Patch `time` and the operator's clocks to return the loop's virtual time while the context lasts."""

    class Date(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Date":
            return cls.fromtimestamp(loop.date().timestamp(), tz)

    with ExitStack() as patches:
        patches.enter_context(patch.object(time, "monotonic", loop.time))
        patches.enter_context(patch.object(time, "time", lambda: loop.date().timestamp()))
        patches.enter_context(patch.object(coordinator_runner, "AwakeClock", partial(AwakeClock, loop.time)))
        patches.enter_context(patch.object(objects, "datetime", Date))
        yield
