"""How often nodes are taken away, by what was seen of them: losses in a worker's hour. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bamboo_core.traces.trace import Change, Trace

USUAL_LOSSES, USUAL_HOURS = 1.0, 20.0  # of a place's workers, before any are counted
Place = tuple[str, str]  # a pool and a zone
HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """How many of a place's workers or nodes that are not there any more were lost, and the hours for which all of them
    were there.
    """

    losses: int = 0
    hours: float = 0.0

    def __add__(self, other: "Exposure") -> "Exposure":
        return Exposure(losses=self.losses + other.losses, hours=self.hours + other.hours)


NOT_SEEN: Final = Exposure()


def hazard(seen: Exposure) -> float:
    """Losses in an hour: with few hours seen about what is usual, with many what was seen."""
    return (seen.losses + USUAL_LOSSES) / (seen.hours + USUAL_HOURS)


def exposures(trace: Trace, until: float) -> Mapping[Place, Exposure]:
    """What a recording of nodes says of each pool in each zone, until that many seconds after it began.

    A node that went when nobody used it any more counts its hours, and is no loss.
    """
    found: dict[Place, Exposure] = {}
    since: dict[str, float] = {}
    place: dict[str, Place] = {}
    for change in trace.changes:
        if change.change is Change.ADD:
            since[change.node], place[change.node] = change.at, (change.pool, change.zone)
            continue
        where, began = place.pop(change.node), since.pop(change.node)
        seen = Exposure(losses=int(not change.idle), hours=(change.at - began) / HOUR)
        found[where] = found.get(where, NOT_SEEN) + seen
    for node, began in since.items():
        seen = Exposure(hours=max(0.0, until - began) / HOUR)
        found[place[node]] = found.get(place[node], NOT_SEEN) + seen
    return found


def of_pool(seen: Mapping[Place, Exposure], pool: str) -> Exposure:
    """What was seen of a pool in all zones."""
    return sum((one for (name, _), one in seen.items() if name == pool), NOT_SEEN)
