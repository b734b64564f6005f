"""The zones in which a job's nodes may be, by its pods' template, and made-up nodes where its pods would be. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bamboo.simulation.figures import SimulationError
from bamboo.traces.generate import Generation, generate
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, pod_spread, wanted_pipelines, wanted_workers
from bamboo_core.traces.trace import Trace, make_trace

MOST_ZONES: Final = 1000  # for numbers of seeds only
SHOWN: Final = 12  # zones in a sentence
NODE_TERMS: Final = (  # where a pod's spec has them
    *("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"),
)


def named_zones(spec: JobSpec) -> tuple[str, ...]:
    """The zones that `worker.template` names for its pods, by nodeSelector or a required nodeAffinity; () if none."""
    key, pod = spec.spread.topology_key, _pod(spec)
    if selected := (pod.get("nodeSelector") or {}).get(key):
        return (str(selected),)
    found = [zone for term in node_terms(spec) for one in _about(term, key, "In") for zone in one.get("values") or ()]
    return tuple(dict.fromkeys(map(str, found)))


def zone_allowed(spec: JobSpec, zone: str) -> bool:
    """May a pod of the job be in that zone? A zone that is not known ("") is taken to be one in which it may."""
    key, pod = spec.spread.topology_key, _pod(spec)
    selected, terms = (pod.get("nodeSelector") or {}).get(key), node_terms(spec)
    if not zone:
        return True
    within = not terms or any(
        all(zone in (one.get("values") or ()) for one in _about(term, key, "In"))
        and not any(zone in (one.get("values") or ()) for one in _about(term, key, "NotIn"))
        for term in terms
    )
    return within and selected in (None, zone)


def allowed_zones(spec: JobSpec, zones: Iterable[str]) -> tuple[str, ...]:
    """The zones, of these and in their order, in which the job may be. Raises SimulationError if there is none."""
    known = tuple(zones)
    found = tuple(zone for zone in known if zone_allowed(spec, zone))
    if known and not found:
        where = f"in {', '.join(named_zones(spec))} only" if named_zones(spec) else "in none of them"
        raise SimulationError(
            f"worker.template lets workers be {where} ({spec.spread.topology_key}), and nodes are in {listed(known)}"
        )
    return found


def listed(zones: Iterable[str]) -> str:
    """The zones' names for a sentence."""
    known = [zone or "no named zone" for zone in zones]
    return ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")


def made_up(generation: Generation, spec: JobSpec, seed: int) -> Trace:
    """A recording of as many made-up nodes as the job wants, in those zones in which its pods would be; in the order of
    the zones, and with ZonePerPipeline beginning at another one for each seed, since nobody says which ones a scheduler
    takes.

    Raises SimulationError if the job may be in none of the zones.
    """
    zones = allowed_zones(spec, generation.zones)
    if not pod_spread(spec).packs:
        return generate(replace(generation, nodes=spec.spread.nodes(wanted_workers(spec)), zones=zones), seed)
    shares = packed(zones, spec, first=seed - 1)
    parts = [
        generate(replace(generation, nodes=spec.spread.nodes(count), zones=(zone,)), seed * MOST_ZONES + number)
        for number, (zone, count) in enumerate(shares.items())
    ]
    changes = [change for part in parts for change in part.changes]
    prices = [price for part in parts for price in part.prices]
    return make_trace(changes, prices, duration=parts[0].duration, source=parts[0].source)


def packed(zones: Sequence[str], spec: JobSpec, first: int = 0) -> dict[str, int]:
    """How many workers a job asks for in each zone that it uses: all in the first one, or whole pipelines in turn."""
    if spec.spread.policy is SpreadPolicy.SINGLE_ZONE:
        return {zones[0]: wanted_workers(spec)}
    count, wanted = wanted_pipelines(spec), wanted_workers(spec)
    found: Counter[str] = Counter()
    for number in range(count):
        found[zones[(first + number) % len(zones)]] += wanted // count + (number < wanted % count)
    return dict(found)


def _pod(spec: JobSpec) -> Mapping[str, Any]:
    found: Mapping[str, Any] = spec.worker.template.get("spec") or {}
    return found


def node_terms(spec: JobSpec) -> tuple[Mapping[str, Any], ...]:
    """The required node affinity of `worker.template`: of its terms one has to hold; () if it asks for none."""
    found: Any = _pod(spec)
    for step in NODE_TERMS:
        found = (found or {}).get(step)
    return tuple(found or ())


def _about(term: Mapping[str, Any], key: str, operator: str) -> Iterator[Mapping[str, Any]]:
    for one in term.get("matchExpressions") or ():
        if one.get("key") == key and one.get("operator") == operator:
            yield one
