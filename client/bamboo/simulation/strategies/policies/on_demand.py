"""On-demand nodes: nobody takes them away. They form their grid once, and train."""

from dataclasses import dataclass

from bamboo.simulation.strategies.costs import Costs
from bamboo.simulation.strategies.policy import Placement, Reaction, View
from bamboo_core.planning.splits.resplit import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemand:
    """A policy on nodes that nobody takes away."""

    costs: Costs
    grid: Grid  # fixed
    saving: None = None

    def begin(self) -> None:
        """The state at the beginning, which is none: the policy remembers nothing."""

    def react(self, state: None, view: View) -> tuple[None, Reaction | None]:
        return None, Reaction(rate=self.costs.rate(self.grid)) if len(view.ready) >= self.grid.cells else None

    def placement(self, state: None) -> Placement:
        """The placement in one zone, which has as many nodes as one pays for."""
        return Placement()
