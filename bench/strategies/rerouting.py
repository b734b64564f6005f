"""Rerouting of a lost node's microbatches to its data-parallel peers (ReCycle, SOSP 2024).

Nodes of the same stage in other pipelines hold the same parameters, so they run the lost node's microbatches, partly
in bubbles, since weight gradients can be postponed and optimizer steps are staggered. Nothing is copied in advance. If
training gets faster by it, losses are spread evenly over the stages (normalised), which moves states, or incomplete
pipelines are dropped. A new node gets its state in the background, and takes a place between two steps. If a stage has
no node left, the job goes back to its checkpoint.
"""

from dataclasses import dataclass, replace

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import Costs
from strategies.places import Places, begun, begun_again
from strategies.policy import Placement, Reaction, Saving, View, in_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouting:
    """A policy that gives a lost node's microbatches to its peers."""

    costs: Costs
    stages: int  # fixed
    saving: Saving

    def begin(self) -> Places:
        return Places()

    def react(self, state: Places, view: View) -> tuple[Places, Reaction | None]:
        costs, lost = self.costs, set(view.lost)
        if not state.grid.pipelines:
            return begun(costs, self.stages, view.ready, self._rate)
        hit = bool(lost) and not lost.isdisjoint(state.cells)
        left = replace(state, cells=tuple("" if name in lost else name for name in state.cells)) if hit else state
        if not all(self._alive(left)):
            return begun_again(costs, self.stages, view.ready, self._rate)
        stall, redo = (costs.detection, costs.batch / 2) if hit else (0.0, 0.0)
        normal = self._normalised(left)
        if normal != left:
            left, stall = normal, stall + costs.regroup(self.stages)
        wanted = self._wanted(left, view)
        if wanted and not hit and left.planned and view.now >= left.planned:
            left = replace(self._filled(left, view), planned=0.0)
            return left, Reaction(rate=self._rate(left), stall=costs.profile.times.regroup)
        wake = None
        if wanted:
            planned = left.planned if left.planned > view.now else view.now + stall + costs.copy(self.stages)
            left, wake = replace(left, planned=planned), planned - view.now
        if not hit and wake is None and left == state:
            return state, None
        return left, Reaction(rate=self._rate(left), stall=stall, redo=redo, wake=wake)

    def placement(self, state: Places) -> Placement:
        return Placement(rows=in_rows(state.cells, self.stages))

    def _alive(self, state: Places) -> list[int]:
        """Return the number of living nodes of each stage."""
        alive, place = [len(state.cells) // self.stages] * self.stages, -1
        for _ in range(state.cells.count("")):
            place = state.cells.index("", place + 1)
            alive[place % self.stages] -= 1
        return alive

    def _normalised(self, state: Places) -> Places:
        """Return places with losses spread over the stages or only whole pipelines; `state` if neither is faster."""
        if "" not in state.cells:
            return state
        names = [name for name in state.cells if name]
        pipelines = -(-len(names) // self.stages)
        fewer = len(names) // self.stages
        spread = self._spread(names, pipelines)
        better = max((state, spread), key=self._rate)
        if 0 < fewer < pipelines:
            whole = Places(
                grid=Grid(self.stages, fewer), cells=tuple(names[: fewer * self.stages]), planned=state.planned
            )
            better = max((better, whole), key=self._rate)
        return better if self._rate(better) > 1.001 * self._rate(state) else state

    def _spread(self, names: list[str], pipelines: int) -> Places:
        cells = [*names, *[""] * (pipelines * self.stages - len(names))]
        return Places(grid=Grid(self.stages, pipelines), cells=tuple(cells))

    def _wanted(self, state: Places, view: View) -> bool:
        """Return whether spare nodes could fill a place, or form a pipeline."""
        spare = len(view.ready) - len(state.cells) + state.cells.count("")
        more = min(len(view.ready) // self.stages, self.costs.microbatches)
        return spare > 0 and ("" in state.cells or more > state.grid.pipelines)

    def _filled(self, state: Places, view: View) -> Places:
        used = set(state.cells)
        spare = [name for name in view.ready if name not in used]
        cells = [name or (spare.pop(0) if spare else "") for name in state.cells]
        while len(spare) >= self.stages and len(cells) // self.stages < self.costs.microbatches:
            cells += [spare.pop(0) for _ in range(self.stages)]
        return Places(grid=Grid(self.stages, len(cells) // self.stages), cells=tuple(cells))

    def _rate(self, state: Places) -> float:
        """Return the samples per second, limited by the stage with the fewest nodes; 0 if a stage has none."""
        if not state.grid.pipelines:
            return 0.0
        costs, least = self.costs, min(self._alive(state))
        if least == state.grid.pipelines:
            return costs.rate(state.grid)
        if not least:
            return 0.0
        return costs.batch / costs.rerouted(state.grid, least)
