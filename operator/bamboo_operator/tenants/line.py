"""Whose turn it is when nodes are few. Pure.

The scheduler gives a node that becomes free to any of the pods that wait for one. So as long as jobs wait for the same
nodes, only the first in line has pods that wait. First come grids that run and have lost workers, of these the ones
that one more loss would hurt; then jobs without a grid; then growth, a pipeline at a time. Among equals the tenant
comes first that has less for its weight, then the older job.

A job without a grid that is not the first gives back the nodes it has: they are of no use to it until it has all. Whose
turn brings no node for `turn_seconds` is passed over, since it may be its own pods for which there is none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from typing import Final

from bamboo_core.text import count
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.tenant_list import FairOrder, TenantList


class NodeUrgency(IntEnum):
    """What a job wants its next nodes for; the smallest is the most urgent."""

    ENDANGERED = 0  # a grid that one more loss would hurt has lost workers
    BROKEN = 1  # a grid has lost workers, and could stand another loss
    BEGINNING = 2  # the job has no grid
    GROWING = 3


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """So many more workers with nodes, for that."""

    job: JobDemand
    urgency: NodeUrgency
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The jobs that wait for the same nodes. Times are of the caller's clock, in seconds.

    lacking: since when some pod has found no node; first: whose turn it is, "" as long as there is no order; since:
    when its turn began, or when it got a node last; placed: how many it had then; goal: how many it is to have before
    another that is as urgent gets its turn. passed: whose turns brought nothing,
    until all have had one.
    """

    lacking: float
    first: str = ""
    since: float = 0.0
    placed: int = 0
    goal: int = 0
    passed: frozenset[str] = frozenset()


Lines = Mapping[str, Line]  # by nodes
NO_LINES: Final[Lines] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A job's place in a line. pods: the most that it may have now. behind: why it waits, a sentence, "" if it does
    not.
    """

    pods: int
    behind: str = ""


def ask_of(job: JobDemand, pods: int) -> NodeRequest | None:
    """What it waits for next; None if that is nothing, or Kueue's to give. pods: that it may have by now."""
    room = min(job.wanting, pods - job.placed)
    if job.queued or room <= 0:
        return None
    if job.runs and job.broken:
        return NodeRequest(job, NodeUrgency.ENDANGERED if job.harm else NodeUrgency.BROKEN, min(job.broken, room))
    if not job.runs and job.placed < job.fewest:
        return NodeRequest(job, NodeUrgency.BEGINNING, min(job.fewest - job.placed, room))
    return NodeRequest(job, NodeUrgency.GROWING, min(job.step, room))


def used_shares(jobs: Iterable[JobDemand], tenants: TenantList) -> dict[str, Fraction]:
    """What each tenant has for its weight, by its name: the largest of its parts of all workers, devices and money."""
    jobs = list(jobs)
    used: dict[str, list[Fraction]] = defaultdict(lambda: [Fraction(0)] * 3)
    owners = tenants.owners(job.namespace for job in jobs)
    for job in jobs:
        has = (Fraction(job.placed), Fraction(job.placed * job.devices), Fraction(job.placed * job.price))
        tenant = owners[job.namespace].name
        used[tenant] = [before + more for before, more in zip(used[tenant], has, strict=True)]
    totals = [sum(column) for column in zip(*used.values(), strict=True)]
    weights = {owner.name: Fraction(owner.weight) for owner in owners.values()}
    return {
        tenant: max(part / total if total else Fraction(0) for part, total in zip(parts, totals, strict=True))
        / weights[tenant]
        for tenant, parts in used.items()
    }


def in_order(asks: Iterable[NodeRequest], tenants: TenantList, used: Mapping[str, Fraction]) -> list[NodeRequest]:
    """The most urgent first; the order is total."""
    asks = list(asks)
    owners = tenants.owners(ask.job.namespace for ask in asks)

    def key(ask: NodeRequest) -> tuple[NodeUrgency, Fraction, float, str]:
        return ask.urgency, used[owners[ask.job.namespace].name], ask.job.made, ask.job.name

    return sorted(asks, key=key)


def next_lines(
    jobs: Iterable[JobDemand], pods: Mapping[str, int], tenants: TenantList, before: Lines, now: float
) -> tuple[Lines, dict[str, Place]]:
    """The lines of now, and the places of the jobs in them, by their names. pods: the most that each may have if nodes
    are not few.
    """
    jobs = list(jobs)
    used = used_shares(jobs, tenants)
    waiting: dict[str, list[NodeRequest]] = defaultdict(list)
    for job in jobs:
        if (ask := ask_of(job, pods[job.name])) is not None:
            waiting[job.nodes].append(ask)
    lines: dict[str, Line] = {}
    places: dict[str, Place] = {}
    for nodes, asks in waiting.items():
        ordered = in_order(asks, tenants, used)
        line = _next_line(ordered, before.get(nodes), tenants.order, now)
        if line is None:
            continue
        lines[nodes] = line
        if line.first:
            places |= _places(ordered, line)
    return lines, places


def _next_line(asks: list[NodeRequest], before: Line | None, order: FairOrder, now: float) -> Line | None:
    """asks: of those that wait, in order. None if nobody waits in vain."""
    if before is None or not before.first:
        if not any(ask.job.lacks_nodes for ask in asks):
            return None
        line = before or Line(lacking=now)
        if now - line.lacking < order.after_seconds or len(asks) < 2:
            return line
    elif len(asks) < 2:
        return Line(lacking=before.lacking) if any(ask.job.lacks_nodes for ask in asks) else None
    else:
        line = _turn_taken(asks, before, order, now)
    names = [ask.job.name for ask in asks]
    passed = line.passed & set(names)
    if passed == set(names):
        passed = frozenset()
    left = [ask for ask in asks if ask.job.name not in passed]
    first = next((ask for ask in left if _keeps_turn(ask, line, left[0])), left[0])
    if first.job.name == line.first and first.job.placed < line.goal:
        return replace(line, passed=passed)
    has = first.job.placed
    return replace(line, first=first.job.name, since=now, placed=has, goal=has + first.workers, passed=passed)


def _keeps_turn(ask: NodeRequest, line: Line, best: NodeRequest) -> bool:
    """Does it go on, though another one would be the first by what its tenant has by now?"""
    return ask.job.name == line.first and ask.urgency is best.urgency and ask.job.placed < line.goal


def _turn_taken(asks: list[NodeRequest], line: Line, order: FairOrder, now: float) -> Line:
    """The line after what has become of its first."""
    first = next((ask.job for ask in asks if ask.job.name == line.first), None)
    if first is None:
        return line
    if first.placed > line.placed:
        return replace(line, since=now, placed=first.placed)
    if now - line.since >= order.turn_seconds:
        return replace(line, passed=line.passed | {first.name})
    return replace(line, placed=first.placed)


def _places(asks: list[NodeRequest], line: Line) -> dict[str, Place]:
    """Who was passed over, and has a grid, may still have pods that wait: they keep nothing from anybody."""
    first = next(ask for ask in asks if ask.job.name == line.first)
    found = {}
    for ask in asks:
        job = ask.job
        tries = ask is first or (job.name in line.passed and ask.urgency is not NodeUrgency.BEGINNING)
        if tries:
            found[job.name] = Place(pods=job.placed + ask.workers)
            continue
        keeps = 0 if ask.urgency is NodeUrgency.BEGINNING else job.placed
        found[job.name] = Place(pods=keeps, behind=f"waits for nodes behind {first.job.name}: {_why(first, ask, line)}")
    return found


def _why(first: NodeRequest, behind: NodeRequest, line: Line) -> str:
    """Why that one comes before this one, a clause."""
    job = first.job
    if behind.job.name in line.passed:
        return "no node came in this job's own turn"
    if first.urgency is NodeUrgency.ENDANGERED:
        return f"it has lost {count(job.broken, 'worker')}, and {job.harm}"
    if first.urgency is NodeUrgency.BROKEN:
        return f"it has lost {count(job.broken, 'worker')}"
    if first.urgency is not behind.urgency:
        return f"it has no grid yet, for which it needs {count(job.fewest, 'worker')}"
    return "its tenant has less for its weight, or it is older"
