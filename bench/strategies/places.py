"""The nodes' places in pipelines with a fixed number of stages, and the start of training on them."""

from collections.abc import Callable
from dataclasses import dataclass

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import NOTHING, Costs
from strategies.policy import Reaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """A grid and the nodes of its cells."""

    grid: Grid = NOTHING
    cells: tuple[str, ...] = ()  # the node at stage s of pipeline d, at d x stages + s; "" where none is left
    planned: float = 0.0  # when new nodes that are getting their states are ready

    @classmethod
    def filled(cls, costs: Costs, stages: int, ready: tuple[str, ...]) -> "Places":
        """Return the places of the fastest grid for these nodes, filled in their order; empty if no grid fits."""
        grid = costs.grid(len(ready), stages)
        return cls(grid=grid, cells=ready[: grid.cells])


def begun(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction | None]:
    """Return the places and the reaction for the first start: no places and None if no grid fits on the nodes.
    rate: returns the samples per second of places.
    """
    after = Places.filled(costs, stages, ready)
    return after, Reaction(rate=rate(after), stall=costs.restart(stages)) if after.cells else None


def begun_again(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction]:
    """Return the places and the reaction for a restart from the checkpoint after a loss. rate: as for `begun`."""
    after = Places.filled(costs, stages, ready)
    stall = costs.detection + (costs.restart(stages) if after.cells else 0.0)
    return after, Reaction(rate=rate(after), stall=stall, redo=None)
