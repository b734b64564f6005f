"""Pipelines of a fixed number of stages: each node's place, and how training begins."""

from collections.abc import Callable
from dataclasses import dataclass

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import NOTHING, Costs
from strategies.policy import Reaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The nodes of a grid, by stage."""

    grid: Grid = NOTHING
    cells: tuple[str, ...] = ()  # the node at stage s of pipeline d, at d x stages + s; "" where none is left
    planned: float = 0.0  # when new nodes that are getting their states are ready

    @classmethod
    def filled(cls, costs: Costs, stages: int, ready: tuple[str, ...]) -> "Places":
        """Return the places of the pipelines that these nodes fill, which are empty if they fill none."""
        grid = costs.grid(len(ready), stages)
        return cls(grid=grid, cells=ready[: grid.cells])


def begun(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction | None]:
    """Return the places at the first start, and the reaction; None while the nodes fill no pipeline. rate: returns
    samples per second.
    """
    after = Places.filled(costs, stages, ready)
    return after, Reaction(rate=rate(after), stall=costs.restart(stages)) if after.cells else None


def begun_again(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction]:
    """Return the places after a loss and a restart from the newest checkpoint. rate: returns samples per second."""
    after = Places.filled(costs, stages, ready)
    stall = costs.detection + (costs.restart(stages) if after.cells else 0.0)
    return after, Reaction(rate=rate(after), stall=stall, redo=None)
