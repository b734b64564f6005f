"""Generation of random traces of spot nodes from a seed. Pure."""

import math
import random
from dataclasses import dataclass
from enum import StrEnum

from bamboo.traces.trace import Change, NodeChange, NodeTraceError, Trace, make_trace
from bamboo_core.job.budget_reach import HOUR

BATCH = 0.5  # the share of a zone's nodes that is removed at once, with the pattern zones
MOST_DRAWS = 5_000_000  # nodes times hours


class Pattern(StrEnum):
    """The pattern of removals. HOURLY: each node independently. ZONES: the share BATCH of a zone's nodes at once."""

    HOURLY = "hourly"
    ZONES = "zones"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The settings of a generated trace."""

    pattern: Pattern = Pattern.HOURLY
    nodes: int = 16  # the number at the beginning, and at most
    hours: float = 24.0
    removal: float = 0.1  # probability that a node is taken away within an hour
    addition: float = 0.5  # probability that a missing node is replaced within an hour
    zones: tuple[str, ...] = ("zone-a",)
    notice: float | None = None  # seconds, None for none


def generate(wanted: Generation, seed: int) -> Trace:
    """Generate a trace of spot nodes, the same for the same arguments on every machine.

    Raises NodeTraceError for missing, empty or repeated zones, more than MOST_DRAWS node-hours, and as `make_trace`.
    """
    if not wanted.zones or len(set(wanted.zones)) != len(wanted.zones) or not all(wanted.zones):
        raise NodeTraceError("--zones must name at least one zone, and each once")
    if wanted.nodes * wanted.hours > MOST_DRAWS:
        raise NodeTraceError(
            f"--hours times the number of nodes must be at most {MOST_DRAWS}, not {wanted.nodes * wanted.hours:.0f}"
        )
    rng = random.Random(seed)
    changes: list[NodeChange] = []
    for number, zone in enumerate(wanted.zones):
        share = len(range(number, wanted.nodes, len(wanted.zones)))
        changes += _zone(wanted, zone, share, rng)
    source = f"generated: {wanted.pattern.value}, seed {seed}"
    return make_trace(changes, duration=wanted.hours * HOUR, source=source)


def _zone(wanted: Generation, zone: str, nodes: int, rng: random.Random) -> list[NodeChange]:
    """Generate the additions and removals of one zone's nodes, hour by hour, not sorted by time.

    A node removed within an hour can be replaced only from the next hour on. nodes: the initial number of nodes, which
    is also the maximum.
    """
    present = [f"{zone}-{number}" for number in range(1, nodes + 1)]
    changes = [NodeChange(at=0.0, change=Change.ADD, node=node, zone=zone) for node in present]
    named, end = nodes, wanted.hours * HOUR
    for hour in range(math.ceil(wanted.hours)):
        begin = hour * HOUR
        gone = [(begin + offset, node) for offset, node in _removals(wanted, present, rng)]
        missing = nodes - len(present)
        moments = [begin + rng.random() * HOUR for _ in range(missing) if rng.random() < wanted.addition]
        gone = [(at, node) for at, node in gone if at <= end]
        taken = {node for _, node in gone}
        present = [node for node in present if node not in taken]
        for at, node in gone:
            changes.append(NodeChange(at=at, change=Change.REMOVE, node=node, zone=zone, notice=wanted.notice))
        for at in sorted(moment for moment in moments if moment <= end):
            named += 1
            present.append(f"{zone}-{named}")
            changes.append(NodeChange(at=at, change=Change.ADD, node=present[-1], zone=zone))
    return changes


def _removals(wanted: Generation, present: list[str], rng: random.Random) -> list[tuple[float, str]]:
    """Draw the removals of one hour from the present nodes, as (seconds since the hour began, node)."""
    if wanted.pattern is Pattern.ZONES:
        size = math.ceil(BATCH * len(present))
        if not present or rng.random() >= wanted.removal * len(present) / size:
            return []
        at = rng.random() * HOUR
        return [(at, node) for node in rng.sample(present, size)]
    chosen = [node for node in present if rng.random() < wanted.removal]
    return [(rng.random() * HOUR, node) for node in chosen]
