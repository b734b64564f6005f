"""Pipeline templates (Oobleck, SOSP 2023): pipelines of different lengths, prepared for any number of nodes.

The job uses all nodes if that is faster. After a loss it instantiates the pipelines anew from the templates for the
remaining nodes. Layers that a pipeline lacks come from another pipeline; the step in flight is repeated. The job keeps
at least f + 1 pipelines, so that f losses at once leave a copy of every layer. With too few nodes for that, or if a
layer has no copy left, the job goes back to its checkpoint.
"""

from dataclasses import dataclass
from itertools import accumulate

from strategies.costs import Costs
from strategies.policy import Placement, Reaction, Saving, View, pays

Pipelines = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """A policy that forms pipelines anew from templates after a loss, or when that pays off with new nodes."""

    costs: Costs
    shortest: int  # stages of the smallest template
    longest: int  # of the largest
    tolerated: int  # f
    saving: Saving
    mtbf: float

    def begin(self) -> Pipelines:
        return ()

    def react(self, state: Pipelines, view: View) -> tuple[Pipelines, Reaction | None]:
        lost = set(view.lost)
        hit = bool(lost) and not all(map(lost.isdisjoint, state))
        after = self._instantiate(view.ready)
        new = self.rate(tuple(len(row) for row in after))
        if not state:
            return after, Reaction(rate=new, stall=self.costs.restart(self.shortest)) if after else None
        rate = self.rate(tuple(len(row) for row in state))
        stall = self.costs.regroup(self.shortest)
        if not hit:
            if after == state or not pays(rate, new, stall, self.mtbf):
                return state, None
            return after, Reaction(rate=new, stall=stall)
        stall += self.costs.detection
        if not after or not self._all_layers(state, lost):
            stall = self.costs.detection + (self.costs.restart(self.shortest) if after else 0.0)
            return after, Reaction(rate=new, stall=stall, redo=None)
        return after, Reaction(rate=new, stall=stall, redo=self.costs.batch / 2)

    def placement(self, state: Pipelines) -> Placement:
        return Placement(rows=state)

    def _instantiate(self, ready: tuple[str, ...]) -> Pipelines:
        """Return the nodes of the fastest pipelines, all of one length, or of two to use more nodes; () if none fit."""
        lengths = self.costs.best_lengths(len(ready), self.shortest, self.longest, self.tolerated + 1)
        return tuple(ready[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True))

    def rate(self, lengths: tuple[int, ...]) -> float:
        """Return the samples per second of pipelines of these lengths in stages. Faster ones get more microbatches."""
        return self.costs.batch / self.costs.uneven(lengths) if lengths else 0.0

    def _all_layers(self, state: Pipelines, lost: set[str]) -> bool:
        """Return whether the remaining nodes hold all layers; node i of n has the part from i/n to (i+1)/n."""
        if any(map(lost.isdisjoint, state)):
            return True
        kept = sorted(
            (place / len(row), (place + 1) / len(row))
            for row in state
            for place, name in enumerate(row)
            if name not in lost
        )
        reached = 0.0
        for begin, end in kept:
            if begin > reached + 1e-9:
                return False
            reached = max(reached, end)
        return reached > 1 - 1e-9
