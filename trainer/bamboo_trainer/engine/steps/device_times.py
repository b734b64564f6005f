"""When the devices of this worker are busy, and with what, where they run ahead of the host.

The host only gives them work to do. Marks between the pieces of it say afterwards what each took, and how long a device
had nothing to do before; nobody waits for them, as one thread serves all devices.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bamboo_trainer.memory.marks import QueueMark
from bamboo_trainer.stage.stage import Stage

Took = Callable[[float, float], None]  # the seconds of a piece of work, and those without any of the schedule's before


@dataclass(frozen=True, slots=True)
class _Measured:
    """A piece of work between two marks. before: behind what the schedule had the device do before it."""

    begin: QueueMark
    end: QueueMark
    before: QueueMark
    took: Took


@dataclass(slots=True)
class _Device:
    """anchor: a mark that was made while nothing was left to do, and when that was. last: behind all that the device
    was given. scheduled: behind the last of that which the schedule demands; freed: when that was done, once it is
    known.
    """

    anchor: tuple[QueueMark, float] | None = None
    last: QueueMark | None = None
    scheduled: QueueMark | None = None
    freed: float | None = None
    measured: deque[_Measured] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        return self.last is not None and not self.last.done()

    def look(self) -> None:
        """Find out when what the schedule demands was done."""
        if self.freed is None and self.anchor and self.scheduled and self.scheduled.done():
            mark, at = self.anchor
            self.freed = at + self.scheduled.since(mark)


@dataclass(frozen=True, slots=True)
class BegunWork:
    """A piece of work that a device is being given."""

    device: _Device
    stage: Stage
    mark: QueueMark


class DeviceTimes:
    """Seconds of the clock throughout. devices: of the worker, which run its device stages in turn."""

    def __init__(self, clock: Callable[[], float], devices: int) -> None:
        self._clock = clock
        self._devices = tuple(_Device() for _ in range(devices))

    def begin(self, stage: Stage, *, with_inputs: bool = False) -> BegunWork:
        """The stage's device is about to be given work. with_inputs: a part of it is to wait for the first inputs."""
        device = self._of(stage.values.index)
        device.look()
        mark, now = stage.mark(), self._clock()
        if not device.busy and (device.scheduled is None or device.freed is not None):
            device.anchor = (mark, now)
        if not with_inputs:
            stage.mark_inputs()
        return BegunWork(device, stage, mark)

    def end(
        self, begun: BegunWork, took: Took | None = None, *, scheduled: bool = True, tells: bool = False
    ) -> QueueMark:
        """It was given that. took: is told of it, later. scheduled: the schedule demands it. tells: the engine is woken
        when it is done.
        """
        device, entry = begun.device, begun.stage.take_entry() or begun.mark
        end, before = begun.stage.mark(tells=tells), device.scheduled or begun.mark
        device.last = end
        if scheduled:
            device.scheduled, device.freed = end, None
        if took is not None:
            device.measured.append(_Measured(entry, end, before, took))
        return end

    @contextmanager
    def measuring(self, stage: Stage, now: Callable[[], float], took: Callable[[float], None]) -> Iterator[None]:
        """Measure what is done inside: of a device that runs ahead by marks, told later; of this thread by `now`."""
        if not stage.runs_ahead:
            begun = now()
            yield
            took(now() - begun)
            return
        begin = stage.mark()
        yield
        measured = _Measured(begin, stage.mark(), begin, lambda seconds, _: took(seconds))
        self._of(stage.values.index).measured.append(measured)

    def collect(self) -> None:
        """Tell of the pieces of work that are done by now."""
        for device in self._devices:
            while device.measured and device.measured[0].end.done():
                piece = device.measured.popleft()
                piece.took(piece.end.since(piece.begin), piece.begin.since(piece.before))

    def forget(self) -> None:
        """Roles have changed: what is being measured says nothing any more."""
        for device in self._devices:
            device.measured.clear()

    def busy(self, stage: int) -> bool:
        """Has the device that runs that device stage something left to do?"""
        return self._of(stage).busy

    def freed(self, stage: int) -> float | None:
        """When that device had done what the schedule demands; None if it has not, or nothing was."""
        device = self._of(stage)
        device.look()
        return device.freed

    def idle(self, stage: int) -> float:
        """How long nothing that the schedule demands is left to do there; without end if nothing was."""
        device = self._of(stage)
        device.look()
        if device.scheduled is None:
            return math.inf
        return 0.0 if device.freed is None else self._clock() - device.freed

    def _of(self, stage: int) -> _Device:
        return self._devices[stage % len(self._devices)]
