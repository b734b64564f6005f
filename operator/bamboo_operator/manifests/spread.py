"""The zones and nodes on which a job's pods go, relative to each other: what the scheduler is asked for. Pure.

Pods do not know of which pipeline they will run a stage: the coordinator gives those of a zone to a pipeline when they
have joined. So with ZonePerPipeline they are made in as many groups as there are pipelines, and a group stays together;
but for a job whose grid the coordinator chooses (`pod_spread`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from bamboo_core import names
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, most_pipelines, pod_spread

Json = dict[str, Any]
HOSTNAME = "kubernetes.io/hostname"
MOST_NODES = 1_000_000  # more than any cluster has


def zone_group(job: JobSpec, living: Iterable[Mapping[str, Any]]) -> int:
    """The group of the next pod: the one with the fewest pods. living: the job's pods that have not ended."""
    if pod_spread(job) is not SpreadPolicy.ZONE_PER_PIPELINE:
        return 0
    found = Counter(str((pod["metadata"].get("labels") or {}).get(names.LABEL_ZONE_GROUP, "")) for pod in living)
    return min(range(most_pipelines(job)), key=lambda group: found[str(group)])


def spread_labels(job: JobSpec, group: int) -> Json:
    """The labels by which pods of a group find each other."""
    return {names.LABEL_ZONE_GROUP: str(group)} if pod_spread(job) is SpreadPolicy.ZONE_PER_PIPELINE else {}


def spread(job: JobSpec, uid: str, group: int) -> Json:
    """What a pod's spec says about others of the same job. uid: of the job.

    Different nodes, as far as it can be had, in any case but None; or those with others of the job, if nodes have room
    for several (workersPerNode), and then never more of them on a node, whatever the policy: a pod waits instead.
    Interleave: over zones, as far as it can be had.
    In the other cases a pod has to be in the zone of its group, of which the first one decides, since what crosses
    zones may cost more than the node; it waits if there are no more nodes in that zone.
    """
    room = job.spread.workers_per_node
    of_job = {"matchLabels": {names.LABEL_JOB_UID: uid}}
    over_zones, affinity = _together(job, of_job, group)
    constraints = over_zones if room == 1 else [*over_zones, _at_most(of_job, room)]
    asked: Json = {}
    if constraints:
        asked["topologySpreadConstraints"] = constraints
    if affinity:
        asked["affinity"] = affinity
    return asked


def _at_most(of_job: Json, room: int) -> Json:
    """A constraint that lets so many pods be on a node. A skew is what a node has beyond the one with the fewest, which
    counts as one with none as long as there are fewer nodes than minDomains.
    """
    return {
        "maxSkew": room,
        "minDomains": MOST_NODES,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": of_job,
    }


def _together(job: JobSpec, of_job: Json, group: int) -> tuple[list[Json], Json]:
    """What is asked of zones as constraints, and the affinity."""
    policy, zone = pod_spread(job), names.LABEL_ZONE
    share = job.spread.workers_per_node > 1
    on_nodes = [_preferred(of_job, HOSTNAME, 100)]
    apart, near = ([], on_nodes) if share else (on_nodes, [])
    if policy is SpreadPolicy.INTERLEAVE:
        over_zones = {"maxSkew": 1, "topologyKey": zone, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": of_job}
        nodes = {"podAffinity" if share else "podAntiAffinity": _if_possible(on_nodes)}
        return [over_zones], nodes
    together = of_job
    if policy is SpreadPolicy.ZONE_PER_PIPELINE:
        mine = {names.LABEL_ZONE_GROUP: str(group)}
        together = {"matchLabels": {**of_job["matchLabels"], **mine}}
        not_mine = {"key": names.LABEL_ZONE_GROUP, "operator": "NotIn", "values": [str(group)]}
        apart.append(_preferred({**of_job, "matchExpressions": [not_mine]}, zone, 50))
    required = [{"labelSelector": together, "topologyKey": zone}]
    in_zone = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    affinity = {"podAffinity": in_zone | (_if_possible(near) if near else {})}
    if apart:
        affinity["podAntiAffinity"] = _if_possible(apart)
    return [], affinity


def _preferred(selector: Json, topology_key: str, weight: int) -> Json:
    return {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": topology_key}}


def _if_possible(terms: list[Json]) -> Json:
    return {"preferredDuringSchedulingIgnoredDuringExecution": terms}
