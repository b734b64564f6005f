"""Checkpoints in the memory of peers, taken in small parts at every step (MoEvement, NSDI 2026).

At each step every node copies a part of its state to a peer's host memory, as much as the network moves meanwhile;
after a window of steps the snapshot is complete. Nodes log boundary tensors. A spare node replaces a lost node and gets
its newest whole snapshot. Only its pipeline repeats the steps since then, from the logs and without bubbles, while the
others wait. With too few spare nodes, pipelines are dropped. The job goes back to its checkpoint in the store if all
nodes of a stage are lost, and with them the snapshot of one of these nodes.
"""

import math
from dataclasses import dataclass, replace

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import Costs
from strategies.places import Places, begun, begun_again
from strategies.policy import Placement, Reaction, Saving, View, in_rows

OVERHEAD = 0.02  # of a step, for snapshots and logs; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheckpoints:
    """A policy that keeps snapshots in the memory of other nodes."""

    costs: Costs
    stages: int  # fixed. A node's snapshot is with the node of the next stage
    saving: Saving

    def begin(self) -> Places:
        return Places()

    def react(self, state: Places, view: View) -> tuple[Places, Reaction | None]:
        costs, lost = self.costs, set(view.lost)
        if not state.grid.pipelines:
            return begun(costs, self.stages, view.ready, self._rate)
        gone = [place for place, name in enumerate(state.cells) if name in lost] if lost else []
        if not gone:
            return self._grown(state, view)
        if not all(self._safe(state, place, lost) for place in gone):
            return begun_again(costs, self.stages, view.ready, self._rate)
        after = self._replaced(state, view)
        if after.grid != state.grid:
            stall = costs.detection + costs.regroup(self.stages)
            return after, Reaction(rate=self._rate(after), stall=stall, redo=costs.batch / 2)
        stall = costs.detection + costs.regroup(self.stages) + self.replay(state.grid)
        return after, Reaction(rate=self._rate(after), stall=stall)

    def placement(self, state: Places) -> Placement:
        """Return the placement. At every step each node sends a part of its snapshot to the next stage's node."""
        if not state.cells:
            return Placement()
        each = self.costs.stage(self.stages).state / self.window(state.grid)
        return Placement(rows=in_rows(state.cells, self.stages), copied=each)

    def window(self, grid: Grid) -> int:
        """Return the number of steps until the peer has a whole snapshot."""
        return max(1, math.ceil(self.costs.moved(self.costs.stage(self.stages).state) / self.costs.step(grid)))

    def replay(self, grid: Grid) -> float:
        """Return the mean seconds of a replay, which covers one and a half windows, since the newest whole snapshot is
        between one and two windows old.
        """
        count = math.ceil(self.costs.microbatches / grid.pipelines)
        return 1.5 * self.window(grid) * count * self.costs.paced(self.stages)

    def _rate(self, state: Places) -> float:
        return self.costs.rate(state.grid) / (1 + OVERHEAD)

    def _safe(self, state: Places, place: int, lost: set[str]) -> bool:
        """Return whether another node of the stage has the place's state, or the next stage's node has its snapshot."""
        pipeline, stage = divmod(place, self.stages)
        peer = state.cells[pipeline * self.stages + (stage + 1) % self.stages]
        holders = {*state.cells[stage :: self.stages]}
        return not holders <= lost or (self.stages > 1 and peer not in lost)

    def _replaced(self, state: Places, view: View) -> Places:
        """Return the places with spare nodes for lost ones, or with fewer pipelines if spare nodes are too few."""
        present, used = set(view.ready), set(state.cells)
        spare = [name for name in view.ready if name not in used]
        missing = sum(1 for name in state.cells if name not in present)
        if missing <= len(spare):
            return replace(state, cells=tuple(name if name in present else spare.pop(0) for name in state.cells))
        kept = [name for name in state.cells if name in present]
        return Places.filled(self.costs, self.stages, (*kept, *spare))

    def _grown(self, state: Places, view: View) -> tuple[Places, Reaction | None]:
        """Add pipelines of spare nodes once these have their states. The reaction is None if none can be added."""
        grid = self.costs.grid(len(view.ready), self.stages)
        if grid.pipelines <= state.grid.pipelines:
            return replace(state, planned=0.0), None
        if not state.planned or view.now < state.planned:
            planned = state.planned or view.now + self.costs.copy(self.stages)
            wake = planned - view.now
            return replace(state, planned=planned), Reaction(rate=self._rate(state), wake=wake)
        used = set(state.cells)
        others = [name for name in view.ready if name not in used]
        after = Places.filled(self.costs, self.stages, (*state.cells, *others))
        return after, Reaction(rate=self._rate(after), stall=self.costs.profile.times.regroup)
