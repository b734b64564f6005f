"""Checkpoint and restart, and job morphing: the remaining nodes restart from the newest checkpoint.

Checkpoint and restart keeps the number of stages, and takes the fastest number of pipelines (TorchElastic with
checkpoints, the first strawman of Bamboo, NSDI 2023). Job morphing takes the fastest grid for the available nodes, with
any number of stages (Varuna, EuroSys 2022), since its checkpoints are by layer. Both strategies grow only when a new
checkpoint is safe, so that little is lost, and only if it pays before the next expected loss.

The policy also models plain torchrun: with --nnodes=MIN:MAX all workers restart whenever a node comes or goes
(`at_every_change`; "Membership Changes" in its documentation); with --nnodes=N they stop while one is lost (`fixed`).
"""

from dataclasses import dataclass, replace

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import NOTHING, Costs
from strategies.policy import Placement, Reaction, Saving, View, in_rows, pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A training grid, and the time of its planned growth."""

    grid: Grid = NOTHING
    used: tuple[str, ...] = ()  # the nodes of the grid
    planned: float = 0.0  # when it grows: once the next checkpoint is safe


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """A policy that restarts all nodes from the newest checkpoint."""

    costs: Costs
    choices: tuple[int, ...]  # numbers of stages; one for checkpoint and restart, several for morphing
    saving: Saving
    mtbf: float
    fixed: Grid | None = None  # the only grid that is ever run; None: the fastest for the available nodes
    at_every_change: bool = False  # restarts with every node that comes or goes

    def begin(self) -> Running:
        return Running()

    def react(self, state: Running, view: View) -> tuple[Running, Reaction | None]:
        costs = self.costs
        lost = not set(state.used).isdisjoint(view.lost)
        grid = self._grid(len(view.ready))
        if lost or not state.used:
            if not lost and not grid.pipelines:
                return state, None
            detected = costs.detection if lost else 0.0
            after = Running(grid=grid, used=view.ready[: grid.cells])
            stall = detected + (costs.restart(grid.stages) if grid.pipelines else 0.0)
            return after, Reaction(rate=costs.rate(grid), stall=stall, redo=None if lost else 0.0)
        rate, new = costs.rate(state.grid), costs.rate(grid)
        if self.at_every_change and (view.joined or view.lost):
            after = Running(grid=grid, used=view.ready[: grid.cells])
            return after, Reaction(rate=new, stall=costs.restart(grid.stages), redo=None)
        if grid == state.grid or not pays(rate, new, costs.restart(grid.stages), self.mtbf):
            return state, None
        if view.now < state.planned:
            return state, Reaction(rate=rate, wake=state.planned - view.now)
        if view.joined or view.lost:
            wait = view.next_save + self.saving.pause + self.saving.delay
            return replace(state, planned=view.now + wait), Reaction(rate=rate, wake=wait)
        after = Running(grid=grid, used=view.ready[: grid.cells])
        return after, Reaction(rate=new, stall=costs.restart(grid.stages), redo=None)

    def placement(self, state: Running) -> Placement:
        return Placement(rows=in_rows(state.used, state.grid.stages))

    def _grid(self, nodes: int) -> Grid:
        if self.fixed is None:
            return self.costs.best(nodes, self.choices)
        return self.fixed if self.fixed.cells <= nodes else NOTHING
