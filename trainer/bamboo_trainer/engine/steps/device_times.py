"""Times of this worker's devices: when each is busy, and with which work, on asynchronous devices.

The host only queues work. Marks between the pieces tell afterwards how long each took; no thread waits for them, since
one thread serves all devices.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.memory.marks import QueueMark
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts

Took = Callable[[float], None]  # the seconds of a piece of work


@dataclass(frozen=True, slots=True)
class _Measured:
    """A piece of work between two marks."""

    begin: QueueMark
    end: QueueMark
    took: Took


@dataclass(slots=True)
class _Device:
    """A device. anchor: a mark made while it was idle, with its time. last: the mark behind all queued work."""

    anchor: tuple[QueueMark, float] | None = None
    last: QueueMark | None = None
    measured: deque[_Measured] = field(default_factory=deque)

    @property
    def freed(self) -> float | None:
        """Return when the device finished all queued work; None if it has not, or had none."""
        if self.anchor is None or self.last is None or not self.last.done():
            return None
        mark, at = self.anchor
        return at + self.last.since(mark)


class DeviceTimes:
    """Seconds of the clock throughout. devices: of the worker, which run its device stages in turn."""

    def __init__(self, clock: Callable[[], float], timer: StageTimer, devices: int) -> None:
        self._clock, self._timer = clock, timer
        self._devices = tuple(_Device() for _ in range(devices))
        self._by_layer = False  # the layers of the work in progress are measured

    @contextmanager
    def measuring(self, stage: Stage | None, took: Took | None = None) -> Iterator[None]:
        """Measure the work inside. took: called with its seconds, on an asynchronous device later; not called for a
        forward whose layers are measured.
        """
        self._by_layer = False
        if stage is None or not stage.runs_ahead:
            begun = self._timer.now() if took else 0.0
            yield
            if took and not self._by_layer:
                took(self._timer.now() - begun)
            return
        device, mark, now = self._of(stage.values.index), stage.mark(), self._clock()
        if device.last is None or device.last.done():
            device.anchor = (mark, now)
        stage.mark_inputs()
        yield
        entry = stage.take_entry() or mark
        device.last = end = stage.mark()
        if took and not self._by_layer:
            device.measured.append(_Measured(entry, end, took))

    def forward_by_layer(self, stage: Stage, work: Work, place: tuple[int, int], inputs: Parts | None) -> Parts:
        """Run a forward with the bits of `Stage.forward`, and report each layer's seconds. place: step, microbatch."""
        self._by_layer, measured = True, self._of(stage.values.index).measured
        forwarding = stage.start(*place, inputs)
        while not forwarding.done:
            took = partial(self._timer.ran_layer, stage.values.index, forwarding.layer)
            if stage.runs_ahead:
                begin = stage.mark()
                stage.advance(forwarding)
                measured.append(_Measured(begin, stage.mark(), took))
            else:
                begun = self._timer.now()
                stage.advance(forwarding)
                took(self._timer.now() - begun)
        return stage.complete(work, forwarding)

    def collect(self) -> None:
        """Report the finished pieces of work."""
        for device in self._devices:
            while device.measured and device.measured[0].end.done():
                piece = device.measured.popleft()
                piece.took(piece.end.since(piece.begin))

    def forget(self) -> None:
        """Drop measurements in progress, as roles have changed."""
        for device in self._devices:
            device.measured.clear()

    def freed(self, stage: int) -> float | None:
        """Return when that device stage's device finished all queued work; None if it has not."""
        return self._of(stage).freed

    def _of(self, stage: int) -> _Device:
        return self._devices[stage % len(self._devices)]
