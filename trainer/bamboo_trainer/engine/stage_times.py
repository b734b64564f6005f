"""Times of a microbatch in each stage that this worker runs, from which slow workers and heavy layers are detected.

They are medians, so a hiccup does not count. Only the ordinary schedule's work counts, without repetitions, waits and
first calls. One forward in `PERIOD` runs layer by layer with a wait after each, which separates the layers' times; a
backward is one call for the whole stage and cannot be separated. Some rehearsals measure the next stage's layers in the
same way, so that workers of one pipeline can be compared.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bamboo_core.planning.schedule import Backward, BackwardRest, BackwardWeight, Forward, Instruction, ReportReady
from bamboo_core.planning.splits.stage_times import LEAST_MICROBATCHES, MOST_MICROBATCHES, MOST_TIMES, StageTimes

IGNORED: Final = 2  # first forwards of a stage, which take longer
PERIOD: Final = 16
KEPT_LAYERS: Final = 8  # forwards of each layer by itself
TOLD_SECONDS: Final = 1.0
FIRST_TOLD: Final = (
    LEAST_MICROBATCHES + 2
)  # microbatches of a stage after which its times are reported before the step ends


def _kept(most: int) -> "Callable[[], deque[float]]":
    return lambda: deque(maxlen=most)


@dataclass(slots=True)
class _ByLayer:
    """One forward that ran layer by layer. after: the whole forwards that followed it, until the next such one."""

    layers: dict[int, float] = field(default_factory=dict)
    after: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Stage:
    """Times of a stage, in seconds.

    weights: of postponed weight gradients. begun: number of forwards of the ordinary schedule begun here. layers: of
    rehearsals. by_layer: of the schedule's own forwards.
    """

    forwards: deque[float] = field(default_factory=_kept(MOST_MICROBATCHES))
    backwards: deque[float] = field(default_factory=_kept(MOST_MICROBATCHES))
    weights: deque[float] = field(default_factory=_kept(MOST_MICROBATCHES))
    layers: dict[int, deque[float]] = field(default_factory=dict)
    by_layer: deque[_ByLayer] = field(default_factory=lambda: deque(maxlen=KEPT_LAYERS))
    begun: int = 0

    def each(self, layers: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of each layer's forward, in order; empty if one was not measured.

        Forwards that run layer by layer are rare, so the newest may be outdated after a change. So each counts by its
        ratio to the whole forwards after it, times the present time of a whole forward.
        """
        whole = [one for one in self.by_layer if one.layers.keys() >= set(layers)]
        if whole:
            now = median(self.forwards) if self.forwards else None
            scales = [now / median(one.after) if now and one.after and median(one.after) else 1.0 for one in whole]
            return tuple(
                median(one.layers[layer] * scale for one, scale in zip(whole, scales, strict=True)) for layer in layers
            )
        if all(self.layers.get(layer) for layer in layers):
            return tuple(median(self.layers[layer]) for layer in layers)
        return ()


class StageTimer:
    """Measures times in the engine's thread; any one thread may call `due`.

    now: the clock, in seconds, which should not count waiting for a processor.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._ranges: Sequence[tuple[int, int]] = ()
        self._stages: dict[int, _Stage] = {}
        self._latest: tuple[StageTimes, ...] = ()
        self._due, self._asked = 0.0, True  # asked: the newest times were returned, or are outdated

    def begin(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Start with a new split. ranges: the layers of each stage."""
        self._ranges, self._stages, self._latest, self._asked = ranges, {}, (), True

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage."""
        return tuple(self._ranges)

    def hold(self, stages: set[int]) -> None:
        """Drop stages other than these, which are held here from now on."""
        self._stages = {index: stage for index, stage in self._stages.items() if index in stages}
        self._asked = True

    def begins_forward(self, stage: int) -> bool:
        """Note that a forward of the ordinary schedule begins; return whether to run and time it layer by layer."""
        measured = self._of(stage)
        measured.begun += 1
        by_layer = measured.begun > IGNORED and (measured.begun - IGNORED) % PERIOD == 1
        if by_layer:
            measured.by_layer.append(_ByLayer())
        return by_layer

    def ran(self, stage: int, instruction: Instruction, seconds: float) -> None:
        """Record an instruction of the ordinary schedule, run in one piece."""
        if isinstance(instruction, ReportReady):
            self._step_done()
            return
        measured = self._of(stage)
        if measured.begun <= IGNORED:
            return
        match instruction:
            case Forward():
                measured.forwards.append(seconds)
                if measured.by_layer:
                    measured.by_layer[-1].after.append(seconds)
            case Backward():
                measured.backwards.append(seconds)
                if len(measured.backwards) == FIRST_TOLD:
                    self._sum_up()
            case BackwardRest():  # part of the last backward, which runs bucket by bucket
                if measured.backwards:
                    measured.backwards[-1] += seconds
            case BackwardWeight():  # the postponed part of a backward
                measured.weights.append(seconds)

    def ran_layer(self, stage: int, layer: int, seconds: float) -> None:
        """Record the forward of one layer, alone."""
        measured = self._of(stage)
        if measured.by_layer:
            measured.by_layer[-1].layers[layer] = seconds
        else:
            measured.layers.setdefault(layer, deque(maxlen=KEPT_LAYERS)).append(seconds)

    def _step_done(self) -> None:
        """Sum up the next times to report, unless the last ones were not returned yet."""
        if self._asked or not all(times.microbatches for times in self._latest):
            self._asked = False
            self._sum_up()

    def _sum_up(self) -> None:
        stages = sorted(self._stages)[:MOST_TIMES]
        self._latest = tuple(self._times(stage, *self._ranges[stage]) for stage in stages)

    def due(self, now: float) -> tuple[StageTimes, ...] | None:
        """Return the latest times, at most once a second; None if they are not due."""
        latest = self._latest
        if not latest or now < self._due:
            return None
        self._due, self._asked = now + TOLD_SECONDS, True
        return latest

    def owned(self) -> list[tuple[int, StageTimes]]:
        """Return the times of measured stages that run here, by stage; for any thread."""
        ranges, self._asked = list(self._ranges), True
        return [(ranges.index(t.layers), t) for t in self._latest if t.microbatches and t.layers in ranges]

    def _of(self, stage: int) -> _Stage:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = _Stage()
        return found

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
    """Round to a ten-thousandth, as heartbeats are short."""
    return float(f"{seconds:.4g}")
