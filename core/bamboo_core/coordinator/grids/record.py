"""What a coordinator knows by which it chooses the grid, if the job lets it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bamboo_core.coordinator.grids import noise
from bamboo_core.coordinator.replacing import replace
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.splits.resplit import Grid
from bamboo_core.planning.steps.grid_rates import GridRate, GridRates

UNLIKE_STEPS: Final = 3  # the first ones on a grid, which take longer than later ones;
LONG_STEP: Final = 10.0  # seconds: of steps that take as long only the first one does


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What undisturbed steps on a grid take. work: seconds of a microbatch of all layers at that time. step: how many
    were committed. at: when it was found, in seconds.
    """

    seconds: float
    work: float
    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The workers of a zone that are not there any more: how many of them were lost, and the hours for which all of
    them were there.
    """

    losses: int = 0
    hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """prices: money an hour of each worker, as the shell says; more: of others, and how many at each, in the order in
    which they would come, the last one also beyond that; () if that is not known.

    there: who stayed at the last look, in which zone and since when; zones: what became of those before them.
    target: how many workers are worth their price, without those on standby; None as long as that is not known, so that
    the job has as many as it may. aim: another number that is better, and since when. told: why that many
    are held.
    looked_at: when that was chosen last; best: by what, and the number that was found.
    """

    prices: Mapping[WorkerId, float] = field(default_factory=dict)
    more: tuple[tuple[float, int], ...] = ()
    there: Mapping[WorkerId, tuple[str, float]] = field(default_factory=dict)
    zones: Mapping[str, Exposure] = field(default_factory=dict)
    target: int | None = None
    aim: tuple[int, float] | None = None
    looked_at: float = -math.inf
    best: tuple[object, int | None] | None = field(default=None, compare=False, repr=False)
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState:
    """Which grid the workers suffice for.

    resize: the grid that is worth a change, and since when, if it is another one than now.
    rates: made of what was known of layers then. network: by which factor links seem to be faster than is assumed.
    looks: what layers took at several moments, the last time when `looked` steps were committed; costs: what they
    usually take, by these. running: the grid that runs, and the origin since which it does; tries: when the grid has
    changed since workers or layers did.
    taken: what the newest undisturbed steps on it took; run: how many there were; heard: how many steps were committed
    at the last turn. measured: what steps took on grids that were run.
    short: the newest step in which a worker ran several stages, and since when. workers: that stay, at the last look;
    changes: the times of their newest changes. gaps: when workers were lost for which none has come yet; refills: the
    newest times that it took until one came. expected: of the grid that the job is to run. told: which one was chosen
    last, what was expected of it and of others. unmet: why no grid has room for what an edit asks for, or "".
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
    told: str = ""
    unmet: str = ""

    def worth(self, grid: Grid, now: float, *, restarting: bool = True) -> "GridState":
        """That grid is worth a change. restarting: the time for which another one was counts for nothing."""
        if self.resize is not None and self.resize[0] == grid:
            return self
        since = now if restarting or self.resize is None else self.resize[1]
        return replace(self, resize=(grid, since))

    def on(self, grid: Grid, origin: int, step: int, now: float) -> "GridState":
        """That grid runs since that origin. What layers took on another one counts for less than what they will take on
        this one.
        """
        if (grid, origin) == self.running:
            return self
        known = replace(self, running=(grid, origin), looked=min(self.looked, step)).disturbed(step)
        if self.running is None or self.running[0] == grid:
            return known
        return replace(known, looks=(self.costs,) * min(len(self.looks), noise.PRIOR), tries=(*self.tries, now))

    def disturbed(self, step: int) -> "GridState":
        """Steps take longer, or layers are split anew: what they take is counted from that step on."""
        return replace(self, taken=(), run=0, heard=step)

    def lacking(self, step: int, now: float) -> "GridState":
        """A worker runs several stages in that step."""
        return self if self.short[0] == step else replace(self, short=(step, now))

    def looking(self, costs: tuple[float, ...], step: int) -> "GridState":
        """Layers take so long now, by microbatches of which no look before this one has told."""
        same = not self.looks or len(self.looks[-1]) == len(costs)
        looks = ((*self.looks, costs) if same else (costs,))[-noise.KEPT :]
        tries = self.tries
        if noise.have_changed(looks):
            looks, tries = looks[noise.KEPT // 2 :], ()
        return replace(self, looks=looks, looked=step, costs=noise.usual(looks), tries=tries)

    def stepped(self, step: int, seconds: float | None = None) -> "GridState":
        """Another step is committed on the grid that runs. seconds: None if it was disturbed."""
        if seconds is None:
            return replace(self, heard=step)
        run, taken = self.run + 1, self.taken
        if run > UNLIKE_STEPS or (run > 1 and seconds >= LONG_STEP):
            taken = (*taken, seconds)[-noise.KEPT :]
        return replace(self, taken=taken, run=run, heard=step)

    def noted(self, workers: int, now: float, wanted: int, spared: int = 0) -> "GridState":
        """With how many stay now, of so many that are wanted: for others that were lost nobody comes. spared: how many
        were given back, for whom nobody comes either.
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
