"""What operators tell each other of the jobs of a tenant whose namespaces are in several shards. Pure.

Each operator decides for its own jobs, by all jobs of the tenant. Those of the others it knows by their claims: what
such a job wants, and the most pods that it may have until another claim is written. An operator lets a job have more
only when all others can see the claim to that, which is written only if nobody has written another one meanwhile. So
the claims never come to more than the bound, whoever is first; and what jobs have is never more than the claims.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from bamboo_core.names import shard_of
from bamboo_operator.tenants.bounds import Share, shares
from bamboo_operator.tenants.demand import JobDemand
from bamboo_operator.tenants.tenant_list import EVERY_OTHER, MANY, Tenant, TenantList

CLAIMED: Final = ("made", "fewest", "step", "most", "devices", "price", "pods", "begun")  # that a claim says of a job
Claims = Mapping[str, JobDemand]  # of the jobs of a namespace, by their names; pods: the most that each may have


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenClaims:
    """What an operator has seen of all claims. version: of the object that holds them; "" if there is none. others:
    the jobs of other operators. reach: how many pods each job of its own may have by claims that were written; mine:
    namespaces of its own of which there are claims. trouble: what keeps claims from being written, "" if nothing does.
    """

    version: str = ""
    others: tuple[JobDemand, ...] = ()
    reach: Mapping[str, int] = field(default_factory=dict)
    mine: frozenset[str] = frozenset()
    trouble: str = ""


def is_divided(tenant: Tenant, shards: int) -> bool:
    """Do bounds of that tenant hold over jobs that several operators may look after?"""
    most = tenant.most
    if shards == 1 or (most.workers >= MANY and most.devices >= MANY and most.money_per_hour is None):
        return False
    return EVERY_OTHER in tenant.namespaces or len({shard_of(one, shards) for one in tenant.namespaces}) > 1


def divided_shares(
    jobs: Collection[JobDemand], tenants: TenantList, seen: SeenClaims, shards: int
) -> tuple[dict[str, Share], dict[str, JobDemand]]:
    """What each of an operator's jobs may have, and what is to be claimed for those of divided tenants; both by their
    names.
    """
    own = {job.name for job in jobs}
    known = [*jobs, *(one for one in seen.others if one.name not in own)]
    found, owners = shares(known, tenants), tenants.owners(job.namespace for job in known)
    divided = {tenant.name for tenant in owners.values() if is_divided(tenant, shards)}
    short = {owners[job.namespace].name for job in known if found[job.name].pods < found[job.name].workers}
    held, claims = dict[str, Share](), dict[str, JobDemand]()
    for job in jobs:
        share, tenant = found[job.name], owners[job.namespace].name
        if tenant in divided:
            share = replace(share, extra=share.extra and tenant not in short)  # or two could wait for each other's
            claims[job.name] = claim_of(job, share)
            share = within_reach(share, job, seen.reach.get(job.name, 0), seen.trouble)
        held[job.name] = share
    return held, claims


def claim_of(job: JobDemand, share: Share) -> JobDemand:
    """A job's claim: what others have to know of it, with what it has or may have in place of its pods."""
    told = {name: getattr(job, name) for name in ("name", "namespace", *CLAIMED)}
    return JobDemand(**told | {"pods": max(job.pods, share.pods + share.extra)})


def within_reach(share: Share, job: JobDemand, reach: int, trouble: str) -> Share:
    """The share as far as it is claimed: a job that has not begun gets its smallest grid or stays as it is."""
    reach = max(reach, job.pods)
    if share.pods + share.extra <= reach:
        return share
    pods = min(share.pods, reach)
    if not job.begun and pods < min(job.fewest, share.workers):
        pods = min(pods, job.pods)
    waits = f"waits until {trouble} can be written, by which operators of other shards know what it has"
    told = waits if trouble and pods < share.pods else share.told
    return replace(share, pods=pods, extra=share.extra and share.pods < reach, told=told)


def written(claims: Claims) -> dict[str, object]:
    """As those of a namespace are kept."""
    found: dict[str, object] = msgspec.to_builtins(
        {name.partition("/")[2]: {key: getattr(job, key) for key in CLAIMED} for name, job in sorted(claims.items())}
    )
    return found


def read_claims(namespace: str, found: object) -> Claims:
    """Raises ValueError if it is not what was written."""
    try:
        by_name = msgspec.convert(found, dict[str, dict[str, Any]])
        told = [{**one, "name": f"{namespace}/{name}", "namespace": namespace} for name, one in by_name.items()]
        return {job.name: job for job in msgspec.convert(told, list[JobDemand])}
    except msgspec.ValidationError as error:
        raise ValueError(f"not what was written: {error}") from None
