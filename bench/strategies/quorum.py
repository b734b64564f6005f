"""Fault tolerance by a quorum, at every step, of replicas of the whole model (torchft).

A replica is a whole pipeline. If it loses a node, the step in flight is not committed. The other replicas regroup and
go on with a batch that is smaller by its share. Its other nodes wait for enough nodes to form a new replica,
which restarts, gets the state from a peer while the others train, and joins between two steps. If no replica is left,
the job goes back to its checkpoint.
"""

from dataclasses import dataclass

from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.costs import Costs
from strategies.policy import Placement, Reaction, Saving, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The training replicas of a model, and the joining replicas."""

    rows: tuple[tuple[str, ...], ...] = ()  # nodes of each training replica
    joining: tuple[tuple[str, ...], ...] = ()  # replicas that train from `planned` on
    planned: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """A policy in which the remaining replicas go on without a lost one."""

    costs: Costs
    grid: Grid  # the desired grid; each replica does its share of the batch, however many there are
    saving: Saving

    def begin(self) -> Replicas:
        return Replicas()

    def react(self, state: Replicas, view: View) -> tuple[Replicas, Reaction | None]:
        costs, stages = self.costs, self.grid.stages
        there = set(view.ready)
        rows = tuple(row for row in state.rows if there.issuperset(row))
        joining = tuple(row for row in state.joining if there.issuperset(row))
        if not rows:
            formed = self._more(view, (), self.grid.pipelines)
            after = Replicas(rows=formed)
            if not state.rows and not formed:
                return after, None
            stall = (costs.detection if state.rows else 0.0) + (costs.restart(stages) if formed else 0.0)
            return after, Reaction(rate=self.rate(len(formed)), stall=stall, redo=None if state.rows else 0.0)
        hit = len(rows) < len(state.rows)
        stall, redo = (costs.detection + costs.profile.times.regroup, costs.batch / 2) if hit else (0.0, 0.0)
        planned = state.planned
        if joining and view.now >= planned:
            rows, joining = (*rows, *joining), ()
            stall += 0.0 if hit else costs.profile.times.regroup
        if not joining:
            joining = self._more(view, rows, self.grid.pipelines - len(rows))
            planned = view.now + stall + costs.profile.times.rendezvous + costs.copy(stages)
        after = Replicas(rows=rows, joining=joining, planned=planned)
        if after == state:
            return state, None
        wake = planned - view.now if joining else None
        return after, Reaction(rate=self.rate(len(rows)), stall=stall, redo=redo, wake=wake)

    def placement(self, state: Replicas) -> Placement:
        return Placement(rows=state.rows)

    def _more(self, view: View, rows: tuple[tuple[str, ...], ...], count: int) -> tuple[tuple[str, ...], ...]:
        """Return the nodes of at most `count` new replicas, formed from ready nodes that are in no row."""
        used = {name for row in rows for name in row}
        free = [name for name in view.ready if name not in used]
        stages = self.grid.stages
        return tuple(tuple(free[at * stages : (at + 1) * stages]) for at in range(min(count, len(free) // stages)))

    def rate(self, replicas: int) -> float:
        return self.costs.rate(self.grid) * replicas / self.grid.pipelines if replicas else 0.0
