"""Upper bounds on the training time that fixed grids keep on a timeline, to skip clearly slower grids. Pure.

A fixed grid stops when it loses one of its nodes, and restarts once enough nodes are ready; other nodes do not matter.
So the times of its starts and losses depend only on its number of nodes, not on their arrangement, and one pass through
the changes serves all grids.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strategies.policy import Saving
from strategies.timeline import Timeline

EDGE = 1e-6  # of an interval: this close to its end a checkpoint counts as taken


@dataclass(frozen=True, slots=True)
class Standing:
    """A period in which a grid runs, in seconds. lost: it ends with the loss of a node, not with the timeline."""

    since: float
    until: float
    lost: bool
    after_loss: bool  # at `since` it lost a node, and had enough others to restart


def standings(nodes: Timeline, sizes: Collection[int]) -> Mapping[int, list[Standing]]:
    """Return, by its number of nodes (`sizes`), the periods in which a grid on the oldest nodes runs."""
    periods: dict[int, list[Standing]] = {size: [] for size in sizes}
    numbers: dict[str, int] = {}  # of ready nodes, in the order in which they came
    ready: list[int] = []
    begun: dict[int, tuple[float, int, bool]] = {}  # of each size: since when, its newest node, whether after a loss
    waiting = set(periods)
    count = 0
    for change in nodes.changes:
        if change.at >= nodes.duration:
            break
        gone = [numbers.pop(name) for name in change.lost if name in numbers]
        for number in gone:
            del ready[bisect_left(ready, number)]
        for name in change.joined:
            if name not in numbers:
                count += 1
                numbers[name] = count
                ready.append(count)
        first, hit = min(gone, default=count + 1), set[int]()
        for size, (since, newest, after_loss) in begun.items():
            if first <= newest:
                periods[size].append(Standing(since, change.at, lost=True, after_loss=after_loss))
                hit.add(size)
        for size in hit:
            del begun[size]
        waiting |= hit
        for size in [size for size in waiting if size <= len(ready)]:
            begun[size] = change.at, ready[size - 1], size in hit
            waiting.discard(size)
    for size, (since, _, after_loss) in begun.items():
        periods[size].append(Standing(since, nodes.duration, lost=False, after_loss=after_loss))
    return periods


def kept_seconds(stood: Collection[Standing], saving: Saving, restart: float, detection: float) -> float:
    """Return an upper bound on the seconds of training that losses do not undo. It assumes that each checkpoint is safe
    at once. restart: seconds from the start of a grid to its first step. detection: seconds from a loss to the start of
    the restart.
    """
    share, kept = saving.every / (saving.every + saving.pause), 0.0
    for one in stood:
        begins = one.since + restart + (detection if one.after_loss else 0.0)
        trained = max(0.0, one.until - begins) * share
        kept += (trained / saving.every + EDGE) // 1 * saving.every if one.lost else trained
    return kept
