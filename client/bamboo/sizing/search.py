"""Search for Pareto-optimal candidates: a filter before simulation, then rounds of simulations, each longer and of
fewer candidates. Pure except for the given simulator.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from bamboo.sizing.calm import Calm, calm, least, memory_needed
from bamboo.sizing.pareto import distance, dominates, front
from bamboo.sizing.space import Limits, combined, grids, protections, smaller
from bamboo.sizing.trials.candidate import PROTECTION, Candidate, job_of
from bamboo.sizing.trials.trial import Assessment, CandidateTrial
from bamboo.sizing.trials.world import HOUR, World

FAR_DEARER: Final = 3.0  # times the cost of a step, for which no protection makes up
CALM_SLACK: Final = 0.5  # a grid whose undisturbed step is so much slower and dearer than another's is not simulated
SLACK: Final = 0.15  # and so much after one short simulation; after n of them, by the root of n
MOST_GRIDS: Final = 24  # that are simulated
MOST_KEPT: Final = 3  # grids of which other protections are simulated
MOST_LONGER: Final = 12  # candidates of the round before the last
MOST_LAST: Final = 6  # candidates of the last round
MOST_SMALLER: Final = 2  # grids that are tried in the place of the best one
LOSSES: Final = (4.0, 6.0)  # expected in a run of the first rounds
LAST_LOSSES: Final = 20.0  # and of the last one, after made-up nodes have settled
SAME: Final = 0.005  # two options of one grid that differ by less in time and cost: the one nearer to the job is enough
LEAST_STEPS: Final = 20  # of a run
LEAST_GAIN: Final = 0.005  # of time x cost, by which a change of the protection has to pay
MOST_EXECUTED: Final = 2000  # steps that are executed before anything is simulated

Simulate = Callable[[str, Sequence[CandidateTrial]], list[Assessment | None]]  # what the round is about, for the user
Choose = Callable[[Sequence[Assessment]], Assessment | None]


@dataclass(slots=True)
class Counts:
    """Counts of tried and dropped candidates."""

    grids: int = 0  # there are
    # forbidden, too_large, slow: of them left out before anything was simulated
    forbidden: int = 0
    too_large: int = 0
    slow: int = 0
    simulated: int = 0  # candidates
    runs: int = 0  # of them all
    smallest: int | None = None  # bytes that the smallest one that is too large needs


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    front: tuple[Assessment, ...]  # ascending in time
    ends: tuple[Assessment, ...]  # all of the last rounds, with runs of full length
    chosen: Assessment | None  # of the front, if one is what is wanted
    calm: tuple[tuple[Candidate, Calm], ...]  # the grids of which any were simulated, and what they take undisturbed
    counts: Counts


class _Race:
    """The newest assessment of each candidate, that of its longest round."""

    def __init__(self, world: World, simulate: Simulate) -> None:
        self._world, self._simulate = world, simulate
        self.newest: dict[Candidate, Assessment] = {}
        self.runs = 0

    def round(self, about: str, candidates: Iterable[Candidate], losses: float, seeds: int) -> list[Assessment]:
        """Return the assessments of the valid candidates, each simulated with so many seeds.

        losses: expected in a run; infinite: until the figures no longer depend on the start.
        """
        trials = [
            CandidateTrial(
                candidate=one,
                seeds=tuple(range(1, seeds + 1)),
                seconds=self._seconds(one, losses),
                short=not math.isinf(losses),
            )
            for one in dict.fromkeys(candidates)
        ]
        found = [one for one in self._simulate(about, trials) if one is not None]
        self.newest |= {one.candidate: one for one in found}
        self.runs += sum(len(one.outcomes) for one in found)
        return found

    def _seconds(self, one: Candidate, losses: float) -> float:
        whole, market = self._world.hours * HOUR, self._world.market
        rate = market.losses_per_hour(one.workers)
        if not rate:
            return whole
        if math.isinf(losses):
            return min(whole, HOUR * (market.settled_hours + LAST_LOSSES / rate))
        start = self._world.machines[one.machine].profile.times.start
        steps = LEAST_STEPS * calm(self._world, one).seconds
        return min(whole, max(losses / rate * HOUR, 4 * start + steps))


def search(world: World, limits: Limits, like: Candidate, simulate: Simulate, choose: Choose) -> SearchResult:
    """Search for options. like: the job as it is, whose protection is the starting point. Raises ValueError if no grid
    fits.
    """
    counts, race = Counts(), _Race(world, simulate)
    kept = fitting_grids(world, limits, like, counts)
    first = near(race.round("grids", [one for one, _ in kept], LOSSES[0], 1), SLACK, MOST_GRIDS)
    chosen = [one.candidate for one in first[:MOST_KEPT]]
    changed = {one: _changed(world, limits, one) for one in chosen}
    race.round("protection", [other for others in changed.values() for other in others], LOSSES[0], 1)
    gains = {one: _gains(race, one, others) for one, others in changed.items()}
    for found in first:
        alike = min(chosen, key=lambda other: abs(other.workers - found.candidate.workers))
        gains.setdefault(found.candidate, gains[alike])
    mixed = [combined(one, gained[:size]) for one, gained in gains.items() for size in range(1, len(gained) + 1)]
    race.round("together", [one for one in mixed if allowed(world, one) and one not in race.newest], LOSSES[0], 1)
    some = near(told_apart(race.newest.values(), like), SLACK, MOST_LONGER)
    longer = race.round("longer", [one.candidate for one in some], LOSSES[1], min(2, world.seeds))
    last = [one.candidate for one in near(longer, SLACK / math.sqrt(2), MOST_LAST)]
    ends = race.round("whole job", last, math.inf, world.seeds)
    if best := choose(_front(ends, like)):
        smaller = _smaller([one for one, _ in kept], limits, best.candidate)
        ends += race.round("smaller grids", smaller, math.inf, world.seeds)
    if best := choose(_front(ends, like)):
        others = [one for one in _contrasts(world, limits, best.candidate) if one not in last]
        ends += race.round("compared", others, math.inf, world.seeds)
    counts.simulated, counts.runs = len(race.newest), race.runs
    ascending = _front(ends, like)
    return SearchResult(
        front=tuple(ascending), ends=tuple(ends), chosen=choose(ascending), calm=tuple(kept), counts=counts
    )


def _changed(world: World, limits: Limits, one: Candidate) -> list[Candidate]:
    """Return other protections of a grid, without those whose undisturbed step already costs far more."""
    most = FAR_DEARER * calm(world, one).usd
    others = [other for other in protections(world, limits, one) if other != one and allowed(world, other)]
    return [other for other in others if other.spread is one.spread or calm(world, other).usd <= most]


def _smaller(grids: Sequence[Candidate], limits: Limits, best: Candidate) -> list[Candidate]:
    """Return smaller grids with the protection of the best candidate and as many workers, more of them on standby. The
    first rounds end before nodes are scarce, and so do not show what standbys are worth.
    """
    alike = [
        one for one in grids if (one.machine, one.pipelines, one.mode) == (best.machine, best.pipelines, best.mode)
    ]
    fewer = sorted((one for one in alike if one.stages < best.stages), key=lambda one: best.stages - one.stages)
    found = [
        replace(best, stages=one.stages, micro_batch=one.micro_batch, standby=best.workers - one.stages * one.pipelines)
        for one in fewer
    ]
    return [one for one in found if not limits.standby or one.standby in limits.standby][:MOST_SMALLER]


def _front(ends: Sequence[Assessment], like: Candidate) -> list[Assessment]:
    """Return the front, ascending in time. A candidate keeps its protection unless the difference is significant."""
    return sorted(front(told_apart(ends, like), lambda one: one.point), key=lambda one: one.point)


def _contrasts(world: World, limits: Limits, chosen: Candidate) -> list[Candidate]:
    """Return the alternatives that a user would ask about: another spread over zones, with and without standbys,
    another mode.
    """
    asked = ("spread", "standby", "mode")
    changed = [one for one in protections(world, limits, chosen) if one != chosen and allowed(world, one)]
    by_thing = {name: [one for one in changed if getattr(one, name) != getattr(chosen, name)] for name in asked}
    return [*by_thing["spread"], *by_thing["standby"][:1], *by_thing["mode"][:1]]


def told_apart(found: Iterable[Assessment], like: Candidate) -> list[Assessment]:
    """Return the options without those that are neither faster nor cheaper than another one of the same grid that is
    closer to the job.
    """

    def changes(one: Assessment) -> int:
        return sum(getattr(one.candidate, name) != getattr(like, name) for name in PROTECTION)

    kept: dict[object, list[Assessment]] = {}
    for one in sorted(found, key=lambda one: (changes(one), one.candidate)):
        others = kept.setdefault(one.candidate.grid, [])
        (time, cost), more = one.point, 1 + SAME
        if not any(other.hours <= time * more and other.usd <= cost * more for other in others):
            others.append(one)
    return [one for others in kept.values() for one in others]


def near(found: Sequence[Assessment], slack: float, most: int) -> list[Assessment]:
    """Return the assessments that no other beats by more than the slack in both. If there are too many, keep the front,
    its ends first, then the nearest to it.
    """
    left = front(found, lambda one: one.point, slack)
    points = [one.point for one in left]
    best = sorted(front(left, lambda one: one.point), key=lambda one: one.point)
    order = [best[i] for i in _from_ends(len(best))]
    rest = [one for one in left if one not in order]
    return (order + sorted(rest, key=lambda one: (distance(one.point, points), one.candidate)))[:most]


def _from_ends(count: int) -> list[int]:
    """Yield the numbers below count: first and last, then the middle of the longest gap."""
    found = [0, count - 1][: min(2, count)]
    while len(found) < count:
        ordered = sorted(found)
        begin, end = max(pairwise(ordered), key=lambda pair: pair[1] - pair[0])
        found.append((begin + end) // 2)
    return found


def _gains(race: _Race, one: Candidate, changed: Sequence[Candidate]) -> list[Candidate]:
    """Return the changes that pay, the best of each field, the most profitable first."""
    base = race.newest[one]
    best: dict[str, Assessment] = {}
    for found in (race.newest[other] for other in changed if other in race.newest):
        thing = next(name for name in PROTECTION if getattr(found.candidate, name) != getattr(one, name))
        if _worth(found) < _worth(base) * (1 - LEAST_GAIN) and _worth(found) < _worth(best.get(thing, base)):
            best[thing] = found
    return [found.candidate for found in sorted(best.values(), key=_worth)]


def _worth(found: Assessment) -> float:
    return found.hours * found.usd


def fitting_grids(world: World, limits: Limits, like: Candidate, counts: Counts) -> list[tuple[Candidate, Calm]]:
    """Return grids that fit into memory, some only in another redundancy mode than the job's, without those whose
    undisturbed step is far slower and dearer than another's.

    Raises ValueError with the reason if there is none.
    """
    fitting = []
    for one in grids(world, limits, like):
        counts.grids += 1
        ways = [way for way in smaller(one) if allowed(world, way)]
        memory = world.machines[one.machine].profile.machine.memory
        needed: list[int] = []
        for way in ways:
            needed.append(memory_needed(world, way))
            if needed[-1] <= memory:
                fitting.append((least(world, way), way))
                break
        else:
            counts.forbidden += not ways
            counts.too_large += bool(ways)
            counts.smallest = min((bytes_ for bytes_ in (counts.smallest, *needed) if bytes_), default=None)
    if not fitting:
        raise ValueError(why_none(counts, bounded=world.spec.elastic is not None))
    fitting.sort(key=lambda pair: (pair[0][0] * pair[0][1], pair[1]))
    executed: list[tuple[Candidate, Calm]] = []
    for bound, one in fitting:
        if len(executed) < MOST_EXECUTED and not any(dominates(c.point, bound, CALM_SLACK) for _, c in executed):
            executed.append((one, calm(world, one)))
    if world.spec.elastic:
        executed = _fastest_of_equal_jobs(executed)
    left = front(executed, lambda pair: pair[1].point, CALM_SLACK)
    points = [pair[1].point for pair in left]
    left.sort(key=lambda pair: (distance(pair[1].point, points), pair[0]))
    counts.slow = len(fitting) - min(len(left), MOST_GRIDS)
    return left[:MOST_GRIDS]


def _fastest_of_equal_jobs(grids: list[tuple[Candidate, Calm]]) -> list[tuple[Candidate, Calm]]:
    """Return the fastest grid of each number of workers, which the coordinator would choose."""
    fastest: dict[object, tuple[Candidate, Calm]] = {}
    for one, cost in sorted(grids, key=lambda pair: pair[1].seconds):
        fastest.setdefault((one.machine, one.micro_batch, one.workers, one.spread), (one, cost))
    return list(fastest.values())


def allowed(world: World, one: Candidate) -> bool:
    """Return whether the manifest's rules allow a candidate, such as a share of a step for every pipeline."""
    return job_of(one, world.spec, world.document) is not None


def why_none(counts: Counts, *, bounded: bool) -> str:
    """Return a sentence on why no grid is left. bounded: whether the job's own bounds apply, too."""
    if counts.too_large and counts.smallest is not None:
        return (
            f"none of {counts.grids} grids fits in any redundancy mode: {counts.too_large} need more memory than the"
            f" machine has, at least {counts.smallest / 1e9:.1f} GB; allow more --nodes, or"
            " smaller microbatches with --micro-batch"
        )
    also = ", or wider bounds in spec.elastic" if bounded else ""
    none = f"none of {counts.grids} grids" if counts.grids else "no grid"
    return f"{none} can be used; allow more --nodes, or other --stages and --pipelines{also}"
