"""What each job of the operator may have now: its tenant's bounds, and its place in line. Pure."""

from collections.abc import Iterable, Mapping

from bamboo_operator.tenants.bounds import Share
from bamboo_operator.tenants.demand import UNBOUND, Grant, HeldBack, JobDemand
from bamboo_operator.tenants.line import Lines, Place, next_lines
from bamboo_operator.tenants.tenant_list import MANY, TenantList


def grants(
    jobs: Iterable[JobDemand], tenants: TenantList, before: Lines, now: float, held: Mapping[str, Share]
) -> tuple[dict[str, Grant], Lines]:
    """Each job's, by its name, and the lines in which they wait. before: the lines of the last decision. now: seconds,
    of any clock. held: what bounds leave each job.
    """
    lines, places = next_lines(jobs, {name: share.pods for name, share in held.items()}, tenants, before, now)
    return {name: _grant(share, places.get(name)) for name, share in held.items()}, lines


def _grant(share: Share, place: Place | None) -> Grant:
    """place: in a line, None if it is in none."""
    told = HeldBack("TenantBound", share.told) if share.told else None
    if place is None:
        return Grant(bound=share.workers, pods=share.pods, extra=share.extra, held_back=told)
    if place.behind:
        told = HeldBack("WaitsInLine", place.behind)
    return Grant(bound=share.workers, pods=min(share.pods, place.pods), in_line=True, held_back=told)


def waiting_for(lacks: str) -> Grant:
    """What a job gets that may not begin without something that the operator cannot read."""
    return Grant(bound=MANY, pods=0, held_back=HeldBack("TenantsUnread", f"waits for {lacks} that can be read"))


def grants_unread(jobs: Iterable[JobDemand]) -> dict[str, Grant]:
    """Without any list of tenants those that have begun go on, and no other begins."""
    waits = waiting_for("a list of tenants (--tenants)")
    return {job.name: UNBOUND if job.begun else waits for job in jobs}
