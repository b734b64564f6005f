"""The domains of nodes, such as racks, to which Kueue has assigned a job's workers. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bamboo_core.names import LABEL_POD_SET

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Domain:
    """labels: of its nodes; count: how many pods of a pod set are to be there."""

    labels: Mapping[str, str]
    count: int


def read_domains(assignment: Json | None) -> tuple[Domain, ...]:
    """The domains of a topologyAssignment, which says what is alike in them only once; none if there is none."""
    if not assignment:
        return ()
    levels = [str(level) for level in assignment["levels"]]
    found = []
    for part in assignment["slices"]:
        number = int(part["domainCount"])
        columns = [_values(level, number) for level in part["valuesPerLevel"]]
        counts = part["podCounts"].get("individual") or [part["podCounts"].get("universal")] * number
        rows = zip(*columns, strict=True)
        found += [Domain(dict(zip(levels, row, strict=True)), int(n)) for row, n in zip(rows, counts, strict=True)]
    return tuple(found)


def _values(level: Json, number: int) -> list[str]:
    if "universal" in level:
        return [str(level["universal"])] * number
    alike = level["individual"]
    return [f"{alike.get('prefix') or ''}{root}{alike.get('suffix') or ''}" for root in alike["roots"]]


def next_domain(domains: Sequence[Domain], pod_set: str, staying: Iterable[Json]) -> Domain:
    """Where the pod set's next pod is to be: in the domain that lacks the fewest, so that pipelines are made whole one
    after the other. staying: the job's pods but those that leave, in whose places others come.
    """
    of_set = [pod for pod in staying if (pod["metadata"].get("labels") or {}).get(LABEL_POD_SET) == pod_set]
    lacking = [domain.count - sum(_is_in(pod, domain) for pod in of_set) for domain in domains]
    free = [number for number, lacks in enumerate(lacking) if lacks > 0]
    if free:
        return domains[min(free, key=lambda number: lacking[number])]
    return domains[max(range(len(domains)), key=lambda number: lacking[number])]


def is_elsewhere(domains: Sequence[Domain], pod: Json) -> bool:
    """Is the pod to be in a domain that is none of these any more, such as a lost node for which there is another?"""
    return bool(domains) and not any(_is_in(pod, domain) for domain in domains)


def _is_in(pod: Json, domain: Domain) -> bool:
    selector = (pod.get("spec") or {}).get("nodeSelector") or {}
    return all(selector.get(key) == value for key, value in domain.labels.items())
