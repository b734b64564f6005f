"""Pipelines of a fixed number of stages: which node is at which place, and how nodes begin to train in them."""

from collections.abc import Callable
from dataclasses import dataclass

from bamboo_core.planning.splits.resplit import Grid
from strategies.costs import NOTHING, Costs
from strategies.policy import Reaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The nodes of a grid, by stage."""

    grid: Grid = NOTHING
    cells: tuple[str, ...] = ()  # who is at stage s of pipeline d, at d x stages + s; "" where nobody is left
    planned: float = 0.0  # when new nodes that were told to get their states are ready

    @classmethod
    def filled(cls, costs: Costs, stages: int, ready: tuple[str, ...]) -> "Places":
        """The places of as many pipelines as these nodes fill; without any node if they fill none."""
        grid = costs.grid(len(ready), stages)
        return cls(grid=grid, cells=ready[: grid.cells])


def begun(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction | None]:
    """The places when training begins for the first time; nothing happens while the nodes fill no pipeline. rate:
    samples a second.
    """
    after = Places.filled(costs, stages, ready)
    return after, Reaction(rate=rate(after), stall=costs.restart(stages)) if after.cells else None


def begun_again(
    costs: Costs, stages: int, ready: tuple[str, ...], rate: Callable[[Places], float]
) -> tuple[Places, Reaction]:
    """The places when training begins again from the newest checkpoint, after a loss. rate: samples a second."""
    after = Places.filled(costs, stages, ready)
    stall = costs.detection + (costs.restart(stages) if after.cells else 0.0)
    return after, Reaction(rate=rate(after), stall=stall, redo=None)
