"""The spread of a job's pods over zones and nodes, as constraints for the scheduler. Pure.

A pod's pipeline is not known in advance: the coordinator assigns the workers of a zone to a pipeline when they have
joined. So ZonePerPipeline creates pods in as many groups as there may be pipelines, and keeps each group in one zone.
If the coordinator chooses the stages and may use several pipelines, `pod_spread` uses Interleave instead.
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
    """Return the zone group of the next pod, the one with the fewest pods; 0 unless the spread is ZonePerPipeline.
    living: the job's pods that neither have ended nor are being deleted.
    """
    if pod_spread(job) is not SpreadPolicy.ZONE_PER_PIPELINE:
        return 0
    sizes = Counter(str((pod["metadata"].get("labels") or {}).get(names.LABEL_ZONE_GROUP, "")) for pod in living)
    return min(range(most_pipelines(job)), key=lambda group: sizes[str(group)])


def spread_labels(job: JobSpec, group: int) -> Json:
    """Return the labels that mark the pods of a zone group; {} unless the spread is ZonePerPipeline."""
    return {names.LABEL_ZONE_GROUP: str(group)} if pod_spread(job) is SpreadPolicy.ZONE_PER_PIPELINE else {}


def spread(job: JobSpec, uid: str, group: int) -> Json:
    """Return the fields of a pod's spec that place it relative to the job's other pods. uid: the job's UID.

    Pods prefer different nodes. With room for several workers per node (workersPerNode) they prefer shared nodes, and a
    pod waits rather than exceed that room. Interleave also prefers different zones. ZonePerPipeline requires one zone
    for all pods of a group, and SingleZone for all pods of the job, since traffic between zones may cost more than a
    node; a pod waits if that zone has no more nodes. Different groups prefer different zones.
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
    """Return a constraint for at most `room` pods per node.

    maxSkew limits how many pods a node has more than the emptiest node. The scheduler assumes 0 pods for the emptiest
    node while the cluster has fewer nodes than minDomains.
    """
    return {
        "maxSkew": room,
        "minDomains": MOST_NODES,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": of_job,
    }


def _together(job: JobSpec, of_job: Json, group: int) -> tuple[list[Json], Json]:
    """Return the topology spread constraints and the affinity that the job's spread policy asks for."""
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
