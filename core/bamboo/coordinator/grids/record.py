"""What a coordinator knows by which it chooses the grid, if the job lets it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo.planning.splits.resplit import Grid
from bamboo.planning.steps.grid_rates import GridRate, GridRates
from bamboo.planning.steps.layer_bytes import LayerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState:
    """layers: of the model, as the first worker said; empty if nobody has. memory: the least that a worker's device
    has; None if that is not known.

    rates: made of what was known of layers then. network: by which factor links seem to be faster than is assumed.
    measured: what undisturbed steps took on grids that were run. workers: that stay, at the last look; changes: the
    times of their newest changes. gaps: when workers were lost for which none has come yet; refills: the newest times
    that it took until one came. expected: of the grid that the job is to run. told: which one was chosen last, what was
    expected of it and of others.
    """

    layers: tuple[LayerBytes, ...] = ()
    memory: int | None = None
    rates: GridRates | None = field(default=None, compare=False, repr=False)
    network: float = 1.0
    measured: Mapping[Grid, float] = field(default_factory=dict)
    workers: int = 0
    changes: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    refills: tuple[float, ...] = ()
    expected: GridRate | None = None
    told: str = ""
