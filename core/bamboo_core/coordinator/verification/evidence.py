"""Whose results are wrong, by all that was said of them. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bamboo_core.control.verification import ForwardPlace
from bamboo_core.planning.plan import Plan, WorkerId

Layers = tuple[int, int]


Place = ForwardPlace
Sums = Mapping[WorkerId, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """Results that differ. layers: of what. said: by each worker, in order. suspect: who has to go if it comes to that.

    returns: how often the job went back to a checkpoint for them.
    """

    place: Place
    layers: Layers
    suspect: WorkerId
    said: Sums = field(default_factory=dict)
    returns: int = 0

    def having(self, said: Sums) -> "Dispute":
        """With what is said now."""
        merged = dict(self.said)
        for worker, sums in said.items():
            merged[worker] = (*merged.get(worker, ()), *sums)
        return replace(self, said=merged)


def layers_of(plan: Plan, place: Place) -> Layers | None:
    """The range of layers that such a result is about under this plan; None if the plan has no such stage."""
    return plan.stages[place.stage] if place.stage < len(plan.stages) else None


def wrong_workers(said: Sums) -> frozenset[WorkerId] | None:
    """Who has to be wrong; None if that cannot be told.

    Equal work gives equal results, so who has come to two different ones is wrong, provided that others have not. Of
    those who always come to the same one, the most are right, if they are at least two and more than agree on any other
    result.
    """
    unsteady = {worker for worker, sums in said.items() if len(set(sums)) > 1}
    steady = {worker: sums[0] for worker, sums in said.items() if len(set(sums)) == 1}
    votes = Counter(steady.values()).most_common(2)
    if not votes:
        return None
    (right, most), *others = votes
    if others and (most < 2 or most == others[0][1]):
        return None
    return frozenset(unsteady | {worker for worker, found in steady.items() if found != right})


def none_is_steady(said: Sums) -> bool:
    """Does nobody come to the same result twice, so that it is no worker's fault?"""
    return len(said) > 1 and all(len(set(sums)) > 1 for sums in said.values())
