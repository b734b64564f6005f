"""Times of the stages and devices of this worker, from which slow workers, heavy layers and idle devices are detected.

`StageTimer` times a microbatch in each stage. Its times are medians, so a hiccup does not count. Only the ordinary
schedule's work counts, without repetitions, waits and first calls. Every `PERIOD`-th forward runs layer by layer, which
separates the layers' times; backwards are timed only for the whole stage. Some rehearsals measure the next stage's
layers in the same way, so that workers of one pipeline can be compared.

`DeviceTimes` measures the pieces of work on devices, and when an asynchronous device has done all of it. The host only
queues work there; marks between the pieces show afterwards how long each took. No thread waits for the marks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final

from bamboo_core.planning.schedule import Backward, BackwardRest, BackwardWeight, Forward, Instruction, ReportReady
from bamboo_core.planning.splits.speeds import LEAST_MICROBATCHES, MOST_MICROBATCHES, MOST_TIMES, StageTimes
from bamboo_trainer.memory.gpus import QueueMark
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts

IGNORED: Final = 2  # first forwards of a stage, which take longer
PERIOD: Final = 16
KEPT_LAYERS: Final = 8  # forwards of a stage that ran layer by layer
REPORT_SECONDS: Final = 1.0
FIRST_REPORT: Final = (
    LEAST_MICROBATCHES + 2
)  # microbatches of a stage after which its times are reported before the step ends


@dataclass(slots=True)
class _ByLayer:
    """Seconds of a forward run layer by layer (layers), and of the whole forwards until the next such one (after)."""

    layers: dict[int, float] = field(default_factory=dict)
    after: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Stage:
    """Times of a stage, in seconds.

    weights: times of postponed weight gradients. by_layer: forwards that ran layer by layer, rehearsals included.
    begun: number of forwards that `StageTimer.begins_forward` has counted.
    """

    forwards: deque[float] = field(default_factory=partial(deque, maxlen=MOST_MICROBATCHES))
    backwards: deque[float] = field(default_factory=partial(deque, maxlen=MOST_MICROBATCHES))
    weights: deque[float] = field(default_factory=partial(deque, maxlen=MOST_MICROBATCHES))
    by_layer: deque[_ByLayer] = field(default_factory=partial(deque, maxlen=KEPT_LAYERS))
    begun: int = 0

    def each(self, layers: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of each layer's forward, in order; empty if no forward has measured all of them.

        Forwards that run layer by layer are rare, so the newest may be outdated. So each one's times are scaled: by the
        present median of whole forwards, divided by the median of the whole forwards that followed it, if any.
        """
        whole = [one for one in self.by_layer if one.layers.keys() >= set(layers)]
        now = median(self.forwards) if self.forwards else None
        scales = [now / median(one.after) if now and one.after and median(one.after) else 1.0 for one in whole]
        return tuple(
            median(one.layers[layer] * scale for one, scale in zip(whole, scales, strict=True))
            for layer in (layers if whole else ())
        )


class StageTimer:
    """The times of stages, measured in the engine's thread. Only one thread may call `due`; any may call `owned`.

    now: the clock, in seconds, which should not count waiting for a processor.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._ranges: Sequence[tuple[int, int]] = ()
        self._stages = defaultdict[int, _Stage](_Stage)
        self._latest: tuple[StageTimes, ...] = ()
        self._due, self._asked = 0.0, True  # asked: the newest times were returned, or are outdated

    def begin(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Drop all times, as this worker begins anew. ranges: the layers of each stage, half-open ranges."""
        self._stages.clear()
        self._ranges, self._latest, self._asked = ranges, (), True

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage, as half-open ranges."""
        return tuple(self._ranges)

    def hold(self, stages: set[int]) -> None:
        """Keep measured times of these stages only, which this worker now holds. The latest summary stays as it is."""
        for index in self._stages.keys() - stages:
            del self._stages[index]
        self._asked = True

    def begins_forward(self, stage: int) -> bool:
        """Count a forward of the ordinary schedule; return whether to run and time it layer by layer."""
        measured = self._stages[stage]
        measured.begun += 1
        by_layer = measured.begun > IGNORED and (measured.begun - IGNORED) % PERIOD == 1
        if by_layer:
            measured.by_layer.append(_ByLayer())
        return by_layer

    def ran(self, stage: int, instruction: Instruction, seconds: float) -> None:
        """Record the seconds of an ordinary instruction of a timed kind. At ReportReady, summarize times if needed."""
        if isinstance(instruction, ReportReady):
            self._step_done()
            return
        measured = self._stages[stage]
        if measured.begun <= IGNORED:
            return
        match instruction:
            case Forward():
                measured.forwards.append(seconds)
                if measured.by_layer:
                    measured.by_layer[-1].after.append(seconds)
            case Backward():
                measured.backwards.append(seconds)
                if len(measured.backwards) == FIRST_REPORT:
                    self._sum_up()
            case BackwardRest():  # part of the last backward, which runs bucket by bucket
                if measured.backwards:
                    measured.backwards[-1] += seconds
            case BackwardWeight():  # the postponed part of a backward
                measured.weights.append(seconds)

    def ran_layer(self, stage: int, layer: int, seconds: float) -> None:
        """Record the seconds of one layer's forward."""
        by_layer = self._stages[stage].by_layer
        if not by_layer or layer in by_layer[-1].layers:  # of a rehearsal
            by_layer.append(_ByLayer())
        by_layer[-1].layers[layer] = seconds

    def _step_done(self) -> None:
        """Summarize the times for the next report, if the latest summary was returned, or is outdated or incomplete."""
        if self._asked or not all(times.microbatches for times in self._latest):
            self._asked = False
            self._sum_up()

    def _sum_up(self) -> None:
        stages = sorted(self._stages)[:MOST_TIMES]
        self._latest = tuple(self._times(stage, *self._ranges[stage]) for stage in stages)

    def due(self, now: float) -> tuple[StageTimes, ...] | None:
        """Return the latest times, at most once in REPORT_SECONDS; None if it is too early, or there are none."""
        latest = self._latest
        if not latest or now < self._due:
            return None
        self._due, self._asked = now + REPORT_SECONDS, True
        return latest

    def owned(self) -> list[tuple[int, StageTimes]]:
        """Return (stage, latest times) of each measured stage that runs or has run here. Any thread may call this."""
        ranges, self._asked = list(self._ranges), True
        return [(ranges.index(t.layers), t) for t in self._latest if t.microbatches and t.layers in ranges]

    def _times(self, stage: int, first: int, end: int) -> StageTimes:
        measured = self._stages[stage]
        whole = bool(measured.forwards and measured.backwards)
        postponed = median(measured.weights) if measured.weights else 0.0
        return StageTimes(
            layers=(first, end),
            forward=_shown(median(measured.forwards)) if whole else 0.0,
            backward=_shown(median(measured.backwards) + postponed) if whole else 0.0,
            each=tuple(_shown(seconds) for seconds in measured.each(range(first, end))),
            microbatches=min(len(measured.forwards), len(measured.backwards)),
        )


def _shown(seconds: float) -> float:
    """Round to four significant digits, to keep heartbeats short."""
    return float(f"{seconds:.4g}")


Took = Callable[[float], None]  # the seconds of a piece of work


@dataclass(frozen=True, slots=True)
class _Measured:
    """A piece of work between two marks."""

    begin: QueueMark
    end: QueueMark
    took: Took


@dataclass(slots=True)
class _Device:
    """A device's record. anchor: a mark made while idle, with its time. last: the mark behind all measured work."""

    anchor: tuple[QueueMark, float] | None = None
    last: QueueMark | None = None
    measured: deque[_Measured] = field(default_factory=deque)

    @property
    def freed(self) -> float | None:
        """The clock's time when the device finished all measured work; None if it has not, or there are no marks."""
        if self.anchor is None or self.last is None or not self.last.done():
            return None
        mark, at = self.anchor
        return at + self.last.since(mark)


class DeviceTimes:
    """The times of work on each device, and when asynchronous ones last became free. devices: their number."""

    def __init__(self, clock: Callable[[], float], timer: StageTimer, devices: int) -> None:
        self._clock, self._timer = clock, timer
        self._devices = tuple(_Device() for _ in range(devices))
        self._by_layer = False  # the layers of the work in progress are measured

    @contextmanager
    def measuring(self, stage: Stage | None, took: Took | None = None) -> Iterator[None]:
        """Measure the time of a stage's work in this context. took: called with the seconds, on an asynchronous device
        later (`collect`) unless `forget` comes first; not called for a forward whose layers are measured one by one.
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
        """Run a forward with the same bits as `Stage.forward`, but time each layer. place: step, microbatch."""
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
        """Pass the seconds of finished pieces of work to their callbacks (`took`)."""
        for device in self._devices:
            while device.measured and device.measured[0].end.done():
                piece = device.measured.popleft()
                piece.took(piece.end.since(piece.begin))

    def forget(self) -> None:
        """Drop the measurements that `collect` has not passed on, as roles may have changed."""
        for device in self._devices:
            device.measured.clear()

    def freed(self, stage: int) -> float | None:
        """Return when a stage's asynchronous device finished its measured work, in clock seconds; None if unknown."""
        return self._of(stage).freed

    def _of(self, stage: int) -> _Device:
        return self._devices[stage % len(self._devices)]
