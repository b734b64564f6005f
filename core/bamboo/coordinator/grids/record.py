"""What a coordinator knows by which it chooses the grid, if the job lets it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo.planning.plan import WorkerId
from bamboo.planning.splits.resplit import Grid
from bamboo.planning.steps.grid_rates import GridRate, GridRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Of a zone's workers that are not there any more: how many were lost, and the hours for which all were there."""

    losses: int = 0
    hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """prices: money an hour of each worker, as the shell says; more: of others, and how many at each, in the order in
    which they would come, the last one also beyond that; () if that is not known.

    there: who stayed at the last look, in which zone and since when; zones: what became of those before them.
    target: how many workers are worth their price, without those on standby; None as long as that is not known, so that
    the job has as many as it may. affordable: how many workers, with those on standby, the budget
    for an hour pays for; None: there is none. aim: another number that is better, and since when. told: why that many
    are held.
    looked_at: when that was chosen last; best: by what, and the number that was found.
    """

    prices: Mapping[WorkerId, float] = field(default_factory=dict)
    more: tuple[tuple[float, int], ...] = ()
    there: Mapping[WorkerId, tuple[str, float]] = field(default_factory=dict)
    zones: Mapping[str, Exposure] = field(default_factory=dict)
    target: int | None = None
    affordable: int | None = None
    aim: tuple[int, float] | None = None
    looked_at: float = -math.inf
    best: tuple[object, int | None] | None = field(default=None, compare=False, repr=False)
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState:
    """rates: made of what was known of layers then. network: by which factor links seem to be faster than is assumed.
    measured: what undisturbed steps took on grids that were run. workers: that stay, at the last look; changes: the
    times of their newest changes. gaps: when workers were lost for which none has come yet; refills: the newest times
    that it took until one came. expected: of the grid that the job is to run. told: which one was chosen last, what was
    expected of it and of others. holding: of the objective Value.
    """

    rates: GridRates | None = field(default=None, compare=False, repr=False)
    network: float = 1.0
    measured: Mapping[Grid, float] = field(default_factory=dict)
    workers: int = 0
    changes: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    refills: tuple[float, ...] = ()
    expected: GridRate | None = None
    told: str = ""
    holding: Holding = field(default_factory=Holding)
