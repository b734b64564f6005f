"""The coordinator's records of the grid (stages, pipelines), the number of workers to hold, and the layers' split."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.coordinator.grids import noise
from bamboo_core.coordinator.replacing import Record, replace
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.splits.speeds import Ranges
from bamboo_core.planning.steps.grid_rates import GridRate, GridRates

UNLIKE_STEPS: Final = 3  # the first steps on a grid, which take longer than later ones
LONG_STEP: Final = 10.0  # seconds: if steps take this long, only the first one is unlike the others


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The measured duration of an undisturbed step on a grid.

    seconds: the median of several steps. work: seconds that all layers together took for a microbatch at that time.
    step: the number of committed steps then. at: when it was measured, in seconds.
    """

    seconds: float
    work: float
    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Ended stays of a zone's workers, by loss or notice. losses: ends not chosen by the job. hours: of all stays."""

    losses: int = 0
    hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Record):
    """The number of workers that the job should hold, by their prices.

    prices: known prices of workers, in money per hour, from the shell. more: prices of further workers and how many at
    each price, in the order in which they would come, the last price without limit; () if unknown.

    staying: the workers without a notice, each with its zone and since when it has stayed. zones: the losses in each
    zone. target: the chosen number of workers, without standbys; None: not chosen, so the job has as many as it may.
    aim: a better target, and since when it has been better. reason: why `target` was chosen, for users; may be "".
    looked_at: when the coordinator last looked for a better target. best: inputs and result of the last comparison.
    """

    prices: Mapping[WorkerId, float] = field(default_factory=dict)
    more: tuple[tuple[float, int], ...] = ()
    staying: Mapping[WorkerId, tuple[str, float]] = field(default_factory=dict)
    zones: Mapping[str, Exposure] = field(default_factory=dict)
    target: int | None = None
    aim: tuple[int, float] | None = None
    looked_at: float = -math.inf
    best: tuple[object, int | None] | None = field(default=None, compare=False, repr=False)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState(Record):
    """The grid for the available workers, and the measurements by which the coordinator chooses it.

    resize: the grid to change to, and since when some change has been pending. rates: estimated step times, by grid.
    network: the factor by which links seem faster than assumed. looks: layers' times at several moments, oldest first.
    looked: number of committed steps at the newest look. costs: each layer's median of the looks. running: the grid
    that runs, and the origin of its states. tries: when the grid changed, since workers or layer times last changed.

    taken: seconds of the newest steps on the running grid since a disturbance. run: number of all these steps, with the
    first ones, which `taken` leaves out. heard: number of committed steps that are recorded. measured: step times of
    grids that have run. short: the newest step that lacked a worker (`lacking`), and since when. workers: number of
    ready ones without notice; changes: times of its newest changes. gaps: times of losses and notices without a
    successor yet. refills: seconds until the newest successors came. expected: the rate of the grid chosen last.
    announced: the last choice, or why there is none, for users. unmet: why no grid fits an edit, or "".
    """

    resize: tuple[Grid, float] | None = None
    rates: GridRates | None = field(default=None, compare=False, repr=False)
    network: float = 1.0
    looks: noise.Looks = ()
    looked: int = 0
    costs: tuple[float, ...] = ()
    running: tuple[Grid, int] | None = None
    tries: tuple[float, ...] = ()
    taken: tuple[float, ...] = ()
    run: int = 0
    heard: int = 0
    measured: Mapping[Grid, StepTime] = field(default_factory=dict)
    short: tuple[int, float] = (-1, 0.0)
    workers: int = 0
    changes: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    refills: tuple[float, ...] = ()
    expected: GridRate | None = None
    announced: str = ""
    unmet: str = ""

    def on(self, grid: Grid, origin: int, step: int, now: float) -> "GridState":
        """Record that this grid runs, with the states of this origin. If another grid ran before, its layer times now
        count as at most noise.PRIOR measurements.
        """
        if (grid, origin) == self.running:
            return self
        known = replace(self, running=(grid, origin), looked=min(self.looked, step)).disturbed(step)
        if self.running is None or self.running[0] == grid:
            return known
        return replace(known, looks=(self.costs,) * min(len(self.looks), noise.PRIOR), tries=(*self.tries, now))

    def disturbed(self, step: int) -> "GridState":
        """Discard the step times in `taken`: steps were disturbed, or the split changed. step: committed steps."""
        return replace(self, taken=(), run=0, heard=step)

    def lacking(self, step: int, now: float) -> "GridState":
        """Record since when this step lacks a worker: a worker runs several cells, or an owner is lost or leaves."""
        return self if self.short[0] == step else replace(self, short=(step, now))

    def looking(self, costs: tuple[float, ...], step: int) -> "GridState":
        """Record the layers' present times in seconds; drop times from before a clear change of their sum or number."""
        same = not self.looks or len(self.looks[-1]) == len(costs)
        looks = ((*self.looks, costs) if same else (costs,))[-noise.KEPT :]
        tries = self.tries
        if noise.have_changed(looks):
            looks, tries = looks[noise.KEPT // 2 :], ()
        return replace(self, looks=looks, looked=step, costs=noise.usual(looks), tries=tries)

    def stepped(self, step: int, seconds: float | None = None) -> "GridState":
        """Record the newest of `step` committed steps. seconds: its time; None if it is unknown or was disturbed."""
        if seconds is None:
            return replace(self, heard=step)
        run, taken = self.run + 1, self.taken
        if run > UNLIKE_STEPS or (run > 1 and seconds >= LONG_STEP):
            taken = (*taken, seconds)[-noise.KEPT :]
        return replace(self, taken=taken, run=run, heard=step)

    def noted(self, workers: int, now: float, wanted: int, spared: int = 0) -> "GridState":
        """Record the number of workers that stay; if it changed, also when, losses without successor, and refill times.

        wanted: the wanted number; lost workers beyond it get no successor. spared: how many workers were given back
        since the last call; they get no successor either.
        """
        known = replace(self, workers=self.workers - spared) if spared else self
        if workers == known.workers:
            return known
        gaps, refills = list(known.gaps), list(known.refills)
        gaps += [now] * (known.workers - workers)
        for _ in range(min(workers - known.workers, len(gaps))):
            refills.append(now - gaps.pop(0))
        gaps = gaps[max(0, len(gaps) - max(0, wanted - workers)) :]
        return replace(
            known,
            workers=workers,
            tries=(),
            changes=(*known.changes, now)[-10:],
            gaps=tuple(gaps)[-100:],
            refills=tuple(refills)[-5:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """A re-split in progress: a new division of the layers over stages (`cut`).

    number: of the request for a cut after `at` or more steps; 0 without a request. asked: the root at the last request.
    asked_at: when the root, or after the cut the workers, were last asked. cut: the state to move; None until the cut
    is known. since: when the request was made; from the cut on, when it became known. held: the layers of that state
    that each worker has reported. stages: the new split if it is only for speed, on the same grid and workers; or None.
    """

    number: int
    at: int
    since: float
    asked: WorkerId | None = None
    asked_at: float = 0.0
    cut: CheckpointId | None = None
    held: Mapping[WorkerId, frozenset[int]] = field(default_factory=dict)
    stages: Ranges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Temporary replicas on idle workers, which prepare a re-split (`filling`). replicas: these workers, by cell.

    origin, grid, staying: the plan's origin, the future grid and the staying workers for which they were chosen.
    """

    origin: int
    grid: Grid
    staying: frozenset[WorkerId]
    replicas: Mapping[Cell, tuple[WorkerId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterSplit:
    """A split of the layers with which steps are expected to be shorter. why: a sentence for the user."""

    stages: Ranges
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(Record):
    """The splits of the layers that the coordinator considers or carries out.

    resplit: the re-split in progress. filling: the temporary replicas before it. uneven: since when, and since which
    step, another split should be faster (`by_speed`). faster: that split, once it is due. evened: if the last re-split
    was for speed, its workers, cell by cell, and when it was over; else None. pause: seconds for which the last
    re-split stopped training; None if unknown.
    """

    resplit: Resplit | None = None
    filling: Filling | None = None
    uneven: tuple[float, int] | None = None
    faster: FasterSplit | None = None
    evened: tuple[tuple[WorkerId, ...], float] | None = None
    pause: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPace:
    """A worker's times for its layers, with which its later times are compared.

    newest: seconds of a microbatch in the newest OWN_LOOKS measurements, oldest first. usual: the smallest median that
    a full `newest` has had; None until `newest` is full while the worker is not slow.
    """

    newest: tuple[float, ...] = ()
    usual: float | None = None
