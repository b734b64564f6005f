"""How many workers each job may hold within its tenant's bounds. Pure.

A job that has begun keeps its smallest grid. Then jobs that wait get theirs, whole, in the order in which they were
made: none begins before an older one of its tenant, so that a large one gets its turn. What is left is dealt out
evenly, a pipeline at a time, so that growth is given back when another job of the tenant begins.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bamboo_core.text import count
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.tenant_list import MANY, Tenant, TenantBounds, TenantList


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Workers that a job may hold, and how many pods it may have by now. extra: one more fits for a while. told: which
    bound keeps it from more, a sentence, "" if it may have all that it wants.
    """

    workers: int
    pods: int
    extra: bool
    told: str = ""


class _Room:
    """What of a tenant's bounds is left; below 0 if jobs that have begun need more."""

    def __init__(self, most: TenantBounds) -> None:
        self._workers, self._devices, self._money = most.workers, most.devices, most.money_per_hour

    def has(self, job: JobDemand, workers: int) -> bool:
        enough = workers <= self._workers and workers * job.devices <= self._devices
        return enough and (self._money is None or workers * job.price <= self._money)

    def take(self, job: JobDemand, workers: int) -> None:
        self._workers -= workers
        self._devices -= workers * job.devices
        if self._money is not None:
            self._money -= workers * job.price


def shares(jobs: Iterable[JobDemand], tenants: TenantList) -> dict[str, Share]:
    """Each job's, by its name."""
    by_tenant: dict[str, tuple[Tenant, list[JobDemand]]] = {}
    jobs = sorted(jobs, key=lambda job: (job.made, job.name))
    owners = tenants.owners(job.namespace for job in jobs)
    for job in jobs:
        tenant = owners[job.namespace]
        by_tenant.setdefault(tenant.name, (tenant, []))[1].append(job)
    return {name: share for tenant, own in by_tenant.values() for name, share in _of_tenant(tenant, own).items()}


def _of_tenant(tenant: Tenant, jobs: Sequence[JobDemand]) -> dict[str, Share]:
    """jobs: the oldest first."""
    room, held, told = _Room(tenant.most), dict[str, int](), dict[str, str]()
    for job in jobs:
        if job.begun:
            held[job.name] = job.fewest
            room.take(job, job.fewest)
    first: JobDemand | None = None  # of those that wait
    for job in jobs:
        if job.begun:
            continue
        held[job.name] = 0
        if not _Room(tenant.most).has(job, job.fewest) or _cap(tenant, job) < job.fewest:
            told[job.name] = f"its smallest grid has {count(job.fewest, 'worker')}, and {_allowed(tenant)}"
        elif first is not None:
            told[job.name] = f"waits until {first.name} of its tenant begins, which is older; {_allowed(tenant)}"
        elif not room.has(job, job.fewest):
            first = job
            why = f"waits until its smallest grid of {count(job.fewest, 'worker')} fits beside the tenant's other jobs"
            told[job.name] = f"{why}: {_allowed(tenant)}"
        else:
            held[job.name] = job.fewest
            room.take(job, job.fewest)
    held |= _grown(tenant, [job for job in jobs if held[job.name]], held, room)
    return _with_pods(tenant, jobs, held, told)


def _with_pods(
    tenant: Tenant, jobs: Sequence[JobDemand], held: Mapping[str, int], told: Mapping[str, str]
) -> dict[str, Share]:
    """What jobs may have at this moment: more only in the room that others have given back by now. told: why some may
    hold none.
    """
    room = _Room(tenant.most)
    for job in jobs:
        room.take(job, job.pods)
    found: dict[str, Share] = {}
    for job in sorted(jobs, key=lambda job: not job.begun):
        workers, pods, why = held[job.name], min(job.pods, held[job.name]), told.get(job.name, "")
        more = max((n for n in range(workers - job.pods + 1) if room.has(job, n)), default=0)
        if not job.begun and job.pods + more < min(job.fewest, workers):
            more, why = 0, "waits until other jobs of its tenant have given workers back"
        if more:
            room.take(job, more)
            pods = job.pods + more
        if workers < job.most and not why:
            why = f"it may have {workers} of {count(job.most, 'worker')}: {_allowed(tenant)}"
        found[job.name] = Share(workers=workers, pods=pods, extra=False, told=why)
    for job in jobs:
        share = found[job.name]
        if share.pods and job.pods <= share.workers and room.has(job, 1):
            room.take(job, 1)
            found[job.name] = replace(share, extra=True)
    return found


def _grown(tenant: Tenant, jobs: Sequence[JobDemand], held: Mapping[str, int], room: _Room) -> dict[str, int]:
    """What jobs hold when the room that is left is dealt out: the next step is for who has the fewest workers."""
    found = {job.name: held[job.name] for job in jobs}
    queue = [(found[job.name], age, job) for age, job in enumerate(jobs)]
    heapq.heapify(queue)
    while queue:
        has, age, job = heapq.heappop(queue)
        more = min(job.step, job.most - has)
        if more > 0 and has + more <= _cap(tenant, job) and room.has(job, more):
            room.take(job, more)
            found[job.name] = has + more
            heapq.heappush(queue, (has + more, age, job))
    return found


def _cap(tenant: Tenant, job: JobDemand) -> int:
    """The most workers that a single job of the tenant may have, whatever its others have."""
    return min(job.most, tenant.most_per_job.workers, tenant.most_per_job.devices // job.devices)


def _allowed(tenant: Tenant) -> str:
    """The tenant's bounds, in words."""
    whole = _numbers(tenant.most.workers, tenant.most.devices)
    if tenant.most.money_per_hour is not None:
        whole.append(f"what {tenant.most.money_per_hour:f} an hour pays for")
    each = _numbers(tenant.most_per_job.workers, tenant.most_per_job.devices)
    bounds = [" and ".join(whole)] * bool(whole) + [f"{' and '.join(each)} for a job"] * bool(each)
    return f"tenant {tenant.name} may have {', '.join(bounds)}"


def _numbers(workers: int, devices: int) -> list[str]:
    bounded = ((workers, "worker"), (devices, "device"))
    return [count(most, thing) for most, thing in bounded if most < MANY]
