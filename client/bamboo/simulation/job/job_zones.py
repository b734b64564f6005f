"""The zones in which a job's pod templates allow nodes, and node traces generated for these zones. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bamboo.simulation.figures import SimulationError
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Trace, make_trace
from bamboo_core import names
from bamboo_core.job.placement_spec import NodePool, SpreadPolicy
from bamboo_core.job.pod_templates import asked_of_nodes
from bamboo_core.job.spec import JobSpec, most_pipelines, pod_spread, wanted_workers

MOST_ZONES: Final = 1000  # for each seed of `made_up`, which gives each zone a seed of its own
SHOWN: Final = 12  # the most zones that a sentence names
NODE_TERMS: Final = (  # their path in a pod's spec
    *("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"),
)


def named_zones(spec: JobSpec) -> tuple[str, ...]:
    """Return the zones that templates require by nodeSelector, else nodeAffinity (In); () if a pool requires none."""
    found = [_named_zones(spec, pool) for pool in spec.node_pools or (None,)]
    return tuple(dict.fromkeys(zone for zones in found for zone in zones)) if all(found) else ()


def _named_zones(spec: JobSpec, pool: NodePool | None) -> list[str]:
    if selected := _selected(spec, pool):
        return [str(selected)]
    terms = node_terms(spec, pool)
    return [str(zone) for term in terms for one in _about(term, "In") for zone in one.get("values") or ()]


def zone_allowed(spec: JobSpec, zone: str) -> bool:
    """Return whether a pod of the job may be in the zone. An unknown zone ("") is assumed to be allowed."""
    return any(pool_allows(spec, pool, zone) for pool in spec.node_pools or (None,))


def pool_allows(spec: JobSpec, pool: NodePool | None, zone: str) -> bool:
    """Return whether a pod of the pool may be in the zone; True if unknown (""). pool: None for a job without pools."""
    selected, terms = _selected(spec, pool), node_terms(spec, pool)
    if not zone:
        return True
    within = not terms or any(
        all(zone in (one.get("values") or ()) for one in _about(term, "In"))
        and not any(zone in (one.get("values") or ()) for one in _about(term, "NotIn"))
        for term in terms
    )
    return within and selected in (None, zone)


def allowed_zones(spec: JobSpec, zones: Iterable[str]) -> tuple[str, ...]:
    """Return the given zones in which the job's workers may run (`worker.template`, node pools), in their order.

    Raises SimulationError if zones are given and none is allowed.
    """
    known = tuple(zones)
    found = tuple(zone for zone in known if zone_allowed(spec, zone))
    if known and not found:
        where = f"in {', '.join(named_zones(spec))} only" if named_zones(spec) else "in none of them"
        raise SimulationError(
            f"worker.template lets workers be {where} ({names.LABEL_ZONE}), and nodes are in {listed(known)}"
        )
    return found


def wanted_zones(spec: JobSpec, given: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return the zones of --zones, else of the job's templates, else `default`; zones that the job forbids are dropped.

    given: the value of --zones, separated by commas; None if unset. Raises SimulationError if all are forbidden.
    """
    zones = () if given is None else tuple(zone.strip() for zone in given.split(","))
    return allowed_zones(spec, zones or named_zones(spec) or default)


def listed(zones: Iterable[str]) -> str:
    """Return the zones' names for a sentence: at most SHOWN names, and the number of further zones."""
    known = [zone or "no named zone" for zone in zones]
    return ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")


def made_up(generation: Generation, spec: JobSpec, seed: int) -> Trace:
    """Generate a trace of as many nodes as the job wants, in the zones where its pods would be.

    Interleave uses all allowed zones, SingleZone the first, ZonePerPipeline one per pipeline, beginning at a zone that
    varies with the seed, as a scheduler's choice does. Raises SimulationError if no zone is allowed; see `generate`.
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
    """Return the number of workers in each zone: all in the first (SingleZone), or one pipeline per zone, round-robin.

    first: the index of the first pipeline's zone.
    """
    if spec.spread.policy is SpreadPolicy.SINGLE_ZONE:
        return {zones[0]: wanted_workers(spec)}
    count, wanted = most_pipelines(spec), wanted_workers(spec)
    workers: Counter[str] = Counter()
    for number in range(count):
        workers[zones[(first + number) % len(zones)]] += wanted // count + (number < wanted % count)
    return dict(workers)


def _selected(spec: JobSpec, pool: NodePool | None) -> Any:
    """Return the zone that a nodeSelector names; None if it names none."""
    return asked_of_nodes(spec, pool)[0].get(names.LABEL_ZONE)


def node_terms(spec: JobSpec, pool: NodePool | None = None) -> tuple[Mapping[str, Any], ...]:
    """Return the alternative terms of a pod's required node affinity; () if it has none.

    A pool's template takes precedence over `worker.template`.
    """
    for template in (pool.template if pool is not None else {}, spec.worker.template):
        part: Any = template.get("spec") or {}
        for step in NODE_TERMS:
            part = (part or {}).get(step)
        if part:
            return tuple(part)
    return ()


def _about(term: Mapping[str, Any], operator: str) -> Iterator[Mapping[str, Any]]:
    """Yield a node selector term's expressions on the zone label with this operator (In or NotIn)."""
    for one in term.get("matchExpressions") or ():
        if one.get("key") == names.LABEL_ZONE and one.get("operator") == operator:
            yield one
