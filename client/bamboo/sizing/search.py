"""Search for Pareto-optimal candidates: estimates select a dozen, which are then simulated in several processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from bamboo.simulation.processes import in_processes
from bamboo.sizing.choice import Bounds, choose
from bamboo.sizing.estimate import (
    Estimate,
    estimate,
    least_seconds,
    memory_needed,
    node_usd,
    step_seconds,
    traffic_of_step,
)
from bamboo.sizing.pareto import Point, dominates, front
from bamboo.sizing.space import Limits, grids, redundancies, spreads, standbys
from bamboo.sizing.trials.candidate import Candidate, edits, job_of
from bamboo.sizing.trials.trial import Assessment, simulate_trial
from bamboo.sizing.trials.world import World

SLACK: Final = 0.5  # a grid whose step is slower and dearer than another's by more than this share is not estimated
MOST_NEAR: Final = 8  # simulated candidates with the best estimates
MOST_SIMULATED: Final = 12  # candidates, with others along the Pareto front


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """The candidates to simulate, and the numbers of grids considered and of grids left out for lack of memory."""

    candidates: tuple[Estimate, ...]
    estimated: tuple[Estimate, ...]  # all that were estimated
    grids: int
    too_large: int  # of the grids, those that need more than the machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The simulated candidates of a search, with the Pareto-optimal ones and the recommended one among them."""

    shortlist: Shortlist
    simulated: tuple[Assessment, ...]
    front: tuple[Assessment, ...]  # the Pareto-optimal ones, ascending in time
    chosen: Assessment | None  # of the front; None if none ends within the bounds

    @property
    def runs(self) -> int:
        return sum(len(one.outcomes) for one in self.simulated)


def search(world: World, limits: Limits, bounds: Bounds, *, jobs: int, done: Callable[[int], None]) -> SearchResult:
    """Search for Pareto-optimal candidates, and choose the one to recommend.

    jobs: number of processes. done: called with the number of runs that have just finished.

    Raises ValueError if no grid fits, and SimulationError if a candidate cannot be simulated.
    """
    listed = shortlist(world, limits, bounds)
    simulated = []
    for assessment in in_processes(partial(simulate_trial, world), [one.candidate for one in listed.candidates], jobs):
        simulated.append(assessment)
        done(len(assessment.outcomes))
    ascending = sorted(front(simulated, lambda one: one.point), key=lambda one: one.point)
    return SearchResult(
        shortlist=listed, simulated=tuple(simulated), front=tuple(ascending), chosen=choose(ascending, bounds)
    )


def shortlist(world: World, limits: Limits, bounds: Bounds) -> Shortlist:
    """Return the candidates to simulate: the best estimates by the bounds, and others along the Pareto front.

    Raises ValueError if no grid fits.
    """
    every = list(grids(world, limits))
    fitting, smallest = [], list[int]()
    for one in every:
        ways = [(memory_needed(world, way), way) for way in redundancies(one)]
        memory = world.machines[one.machine].profile.machine.memory
        fits = [way for needed, way in ways if needed <= memory]
        smallest += [min(needed for needed, _ in ways)] if not fits else []
        fitting += fits if one.pipelines > 1 else fits[:1]  # without replicas a single pipeline's loss is the end
    if not fitting:
        raise ValueError(why_none(len(every), min(smallest, default=0), bounded=world.spec.elastic is not None))
    estimated = []
    for one, seconds in _fast(world, fitting):
        for placed in spreads(world, one):
            traffic = traffic_of_step(world, placed)
            estimated += [estimate(world, way, seconds, traffic) for way in standbys(world, limits, placed)]
    return Shortlist(
        candidates=tuple(_nearest(world, estimated, bounds)),
        estimated=tuple(estimated),
        grids=len(every),
        too_large=len(smallest),
    )


def _fast(world: World, fitting: Sequence[Candidate]) -> list[tuple[Candidate, float]]:
    """Return (candidate, seconds of an undisturbed step) of each candidate that no other one dominates by SLACK."""

    def point(one: Candidate, seconds: float) -> Point:
        return seconds, seconds * node_usd(world, one)

    bounds = sorted(((point(one, least_seconds(world, one)), one) for one in fitting), key=lambda pair: pair[0])
    executed: list[tuple[Candidate, float]] = []
    for bound, one in sorted(bounds, key=lambda pair: pair[0][0] * pair[0][1]):
        if not any(dominates(point(*other), bound, SLACK) for other in executed):
            executed.append((one, step_seconds(world, one)))
    return front(executed, lambda pair: point(*pair), SLACK)


def _nearest(world: World, estimated: Sequence[Estimate], bounds: Bounds) -> list[Estimate]:
    """Return at most MOST_SIMULATED candidates that the manifest's rules allow.

    The candidates with the best estimates by the bounds come first, then others along the Pareto front, then the next
    best. If several candidates need the same edits of the manifest, only the first is returned.
    """
    best = sorted(front(estimated, lambda one: one.point), key=lambda one: one.point)
    hours, usd = min(best, key=lambda one: bounds.rank(*one.point)).point

    def distance(one: Estimate) -> float:
        """Return time x cost; with bounds, the larger of the ratios of time and of cost to the best estimate's."""
        return max(one.hours / hours, one.usd / usd) if bounds.any else one.hours * one.usd

    near = sorted(estimated, key=distance)
    jobs: dict[object, Estimate] = {}  # by their edits: where the coordinator chooses the grid, several are one job
    for one in [*near[:MOST_NEAR], *(best[number] for number in _from_ends(len(best))), *near]:
        if len(jobs) < MOST_SIMULATED and job_of(one.candidate, world.spec, world.document) is not None:
            jobs.setdefault(tuple(edits(one.candidate, world.spec).items()), one)
    return list(jobs.values())


def _from_ends(count: int) -> list[int]:
    """Return the numbers 0 to count - 1 in this order: first, last, then repeatedly the middle of the longest gap."""
    found = [0, count - 1][: min(2, count)]
    while len(found) < count:
        ordered = sorted(found)
        begin, end = max(pairwise(ordered), key=lambda pair: pair[1] - pair[0])
        found.append((begin + end) // 2)
    return found


def why_none(count: int, smallest: int, *, bounded: bool) -> str:
    """Return a sentence on why no grid can be used.

    count: of grids. smallest: bytes that the smallest grid needs; 0 if there is no grid. bounded: spec.elastic is set.
    """
    if smallest:
        return (
            f"none of {count} grids fits in any redundancy mode: they need more memory than the machine has, at least"
            f" {smallest / 1e9:.1f} GB; allow more --nodes, or smaller microbatches with --micro-batch"
        )
    also = ", or wider bounds in spec.elastic" if bounded else ""
    return f"no grid can be used; allow more --nodes, or other --stages and --pipelines{also}"
