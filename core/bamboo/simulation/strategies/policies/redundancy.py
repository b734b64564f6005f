"""Bamboo itself, as simple arithmetic: neighbours and data-parallel peers take lost stages over within the step.

A lost stage goes to the node before it, which keeps a replica (`redundancy.mode: LazyForward`), or to the owner of the
same stage in another pipeline. That node does both, so its pipeline is slower, until a spare node has got a copy and
takes one of them, or until the layers are split anew for the nodes that are left. No step is lost by any of this. Only
if nobody holds a stage any more the job goes back to its checkpoint. What the real coordinator decides, and when, is in
`bamboo simulate JOB.yaml`; this is its policy beside the others'.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from bamboo.planning.splits.resplit import Grid
from bamboo.simulation.strategies.costs import NOTHING, Costs
from bamboo.simulation.strategies.policy import Placement, Reaction, Saving, View, in_rows
from bamboo.simulation.strategies.saving import pays

HEAL_STEPS = 0.43  # that a heal takes, measured by bench/elastic.py
RESPLIT_STEPS = 0.60  # that another grid takes, the same
MOST_STAGES = 2  # that a device's memory is planned for


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """cells: who has stage s of pipeline d, at d x stages + s. alone: until when a cell's replica is being filled.
    planned: when spare nodes have their copies; 0 if none is asked for.
    """

    grid: Grid = NOTHING
    cells: tuple[str, ...] = ()
    alone: dict[int, float] = field(default_factory=dict)
    planned: float = 0.0

    @property
    def load(self) -> int:
        """The most cells that a node has."""
        return max(Counter(self.cells).values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """choices: numbers of stages of which a device holds two. replicas: whether neighbours keep them."""

    costs: Costs
    choices: tuple[int, ...]
    replicas: bool
    saving: Saving
    mtbf: float

    def begin(self) -> Owners:
        return Owners()

    def react(self, state: Owners, view: View) -> tuple[Owners, Reaction | None]:
        lost = set(view.lost)
        if not state.cells:
            after = self._formed(view.ready)
            return after, Reaction(rate=self._rate(after), stall=self._restart(after)) if after.cells else None
        stall = 0.0
        if not lost.isdisjoint(state.cells):
            taken = self._taken_over(state, lost, view.now)
            if taken is None:
                after = self._formed(view.ready)
                stall = self.costs.detection + self._restart(after)
                return after, Reaction(rate=self._rate(after), stall=stall, redo=None)
            stall = self.costs.detection + self._repeated(state.grid)
            state = taken
        after, more = self._improved(state, view, stall)
        if after == state and not view.lost and not view.joined and not more:
            return state, None
        wake = after.planned - view.now if after.planned else None
        return after, Reaction(rate=self._rate(after), stall=stall + more, wake=wake)

    def placement(self, state: Owners) -> Placement:
        """A replica gets the gradients of every step."""
        copied = self.costs.stage(state.grid.stages).gradients if self.replicas and state.cells else 0.0
        return Placement(rows=in_rows(state.cells, state.grid.stages), copied=copied)

    # losses

    def _taken_over(self, state: Owners, lost: set[str], now: float) -> Owners | None:
        """None if nobody holds one of the stages."""
        stages = state.grid.stages
        cells, alone = list(state.cells), {place: until for place, until in state.alone.items() if until > now}
        filled = now + self.costs.detection + self.costs.copy(stages)
        for place, name in enumerate(state.cells):
            if name not in lost:
                continue
            row, stage = divmod(place, stages)
            heirs = [state.cells[at] for at in range(stage, len(cells), stages)]
            if self.replicas and place not in alone:
                before = (state.cells[row * stages + (stage - back) % stages] for back in range(1, stages))
                heirs[:0] = [heir for heir in before if heir != name][:1]
            heirs = [heir for heir in heirs if heir not in lost]
            if not heirs:
                return None
            cells[place] = min(heirs, key=cells.count)
        for place, name in enumerate(state.cells):
            if name in lost:
                following = place - place % stages + (place + 1) % stages
                alone |= {place: filled, following: filled}
        return replace(state, cells=tuple(cells), alone=alone)

    def _repeated(self, grid: Grid) -> float:
        """On average half of the step's work of one stage, which the heir does while the others wait."""
        return 0.5 * math.ceil(self.costs.microbatches / grid.pipelines) * self.costs.paced(grid.stages)

    # getting better

    def _improved(self, state: Owners, view: View, stall: float) -> tuple[Owners, float]:
        """Heal with spare nodes, or run on another grid; and for how long that stalls. Copies come first."""
        costs, rate = self.costs, self._rate(state)
        spare = [name for name in view.ready if name not in set(state.cells)]
        ready = state.planned and view.now >= state.planned
        if state.load > 1 and spare and ready:
            healed = self._healed(state, spare)
            return replace(healed, planned=0.0), HEAL_STEPS * costs.step(state.grid)
        grid = self._best(len(view.ready))
        new = costs.rate(grid, replicas=self.replicas)
        grown = grid.stages == state.grid.stages and grid.pipelines > state.grid.pipelines and state.load == 1
        another = RESPLIT_STEPS * costs.step(grid) + (0.0 if grown else costs.copy(grid.stages)) if grid.cells else 0.0
        healing = self._rate(self._healed(state, spare)) if spare else rate
        if new > healing and pays(max(rate, healing), new, another, self.mtbf):
            if grown and not ready:
                return self._copying(state, view, stall), 0.0
            return self._seated(grid, state, view.ready), another
        if state.load > 1 and spare:
            return self._copying(state, view, stall), 0.0
        return replace(state, planned=0.0), 0.0

    def _copying(self, state: Owners, view: View, stall: float) -> Owners:
        if state.planned > view.now:
            return state
        return replace(state, planned=view.now + stall + self.costs.copy(state.grid.stages))

    def _healed(self, state: Owners, spare: list[str]) -> Owners:
        """Spare nodes take cells from those that have several."""
        cells, left, seen = list(state.cells), list(spare), Counter[str]()
        for place, name in enumerate(cells):
            seen[name] += 1
            if seen[name] > 1 and left:
                cells[place] = left.pop(0)
        return replace(state, cells=tuple(cells))

    def _seated(self, grid: Grid, state: Owners, ready: tuple[str, ...]) -> Owners:
        kept = dict.fromkeys(state.cells)
        order = (*kept, *(name for name in ready if name not in kept))
        return Owners(grid=grid, cells=order[: grid.cells])

    # the grid

    def _formed(self, ready: tuple[str, ...]) -> Owners:
        grid = self._best(len(ready))
        return Owners(grid=grid, cells=ready[: grid.cells])

    def _best(self, nodes: int) -> Grid:
        return self.costs.best(nodes, self.choices, lambda grid: self.costs.rate(grid, replicas=self.replicas))

    def _restart(self, state: Owners) -> float:
        return self.costs.restart(state.grid.stages) if state.cells else 0.0

    def _rate(self, state: Owners) -> float:
        """Nothing, if a node would have to hold more stages than its memory is planned for."""
        if not state.cells or state.load > MOST_STAGES:
            return 0.0
        return self.costs.rate(state.grid, float(state.load), replicas=self.replicas)
