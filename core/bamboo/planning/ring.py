"""Pipelines as rings of workers: who follows whom, and who keeps the replicas of whose state. Pure.

The worker before a stage's owner knows the stage's inputs, because it computes them, so it is the stage's shadow. With
several replicas those before it come next: they are far enough in the ring that neighbours may be lost at once, and in
other zones where that is possible, so that zones may be.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain, islice

from bamboo.job.placement_spec import SpreadPolicy
from bamboo.planning.plan import Peer, WorkerId

MOST_LOOKED_AT = 4096  # stages of all changes to a row that are tried: 64 changes of 64 stages
REACH = 12  # predecessors that may keep a stage's replicas for the sake of zones

Crowding = tuple[int, ...]


def ring(peers: Sequence[Peer], size: int, apart: int = 1) -> list[Peer]:
    """Choose and order `size` workers so that neighbours sit in different zones where that is possible.

    Greedy: always take from the zone with the most workers left that none of the `apart` workers before is in; else
    from one that fewer of them are in.
    """
    left: dict[str, list[Peer]] = {}
    for peer in peers:
        left.setdefault(peer.zone, []).append(peer)
    chosen: list[Peer] = []
    while len(chosen) < size:
        zones = sorted((z for z in left if left[z]), key=lambda z: (-len(left[z]), z))
        for near in range(apart, -1, -1):
            others = [z for z in zones if z not in {p.zone for p in chosen[len(chosen) - near :]}]
            if others or not near:
                chosen.append(left[(others or zones)[0]].pop(0))
                break
    return chosen


def rows(
    peers: Sequence[Peer], depth: int, pipelines: int, replicas: int, spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
) -> list[list[WorkerId]]:
    """Each pipeline's workers, in the order of its stages: so that as many zones as may be can be lost at once, or so
    that as few neighbours as may be are in different ones.
    """
    if spread.packs:
        return packed(peers, depth, pipelines, spread)
    return min(_arranged(peers, depth, pipelines, replicas, apart) for apart in range(max(1, replicas), 0, -1))[1]


def packed(
    peers: Sequence[Peer], depth: int, pipelines: int, spread: SpreadPolicy, taken: Collection[str] = ()
) -> list[list[WorkerId]]:
    """Each pipeline in one zone where that is possible, else in few, those of a zone side by side.

    Pipelines share a zone with SingleZone, the one with the most workers, and with ZonePerPipeline only if the others
    have too few. taken: zones of pipelines that there are already.
    """
    left: dict[str, list[WorkerId]] = {}
    for peer in peers:
        left.setdefault(peer.zone, []).append(peer.worker)
    used, shared = set(taken), spread is SpreadPolicy.SINGLE_ZONE
    found: list[list[WorkerId]] = []
    for _ in range(pipelines):
        row: list[WorkerId] = []
        while len(row) < depth:
            lacking = depth - len(row)
            whole = [zone for zone in left if len(left[zone]) >= lacking]
            zones = sorted(whole or left, key=lambda z: len(left[z]) if shared or not whole else 0, reverse=True)
            zone = next((z for z in zones if (z in used) is shared), zones[0]) if whole else zones[0]
            row += left[zone][:lacking]
            left[zone] = left[zone][lacking:]
            used.add(zone)
        found.append(row)
    return found


def _arranged(
    peers: Sequence[Peer], depth: int, pipelines: int, replicas: int, apart: int
) -> tuple[tuple[Crowding, ...], list[list[WorkerId]]]:
    """The rows from a ring, and, for the comparison with others, how crowded the holders of their stages are."""
    order = ring(peers, depth * pipelines, apart)
    made: list[list[Peer]] = []
    for d in range(pipelines):
        used = {p.worker for p in order} | {p.worker for row in made for p in row}
        spare = [p for p in peers if p.worker not in used]
        made.append(close_ring(order[d * depth : (d + 1) * depth], spare, replicas))
    return tuple(_crowding(row, replicas) for row in made), [[p.worker for p in row] for row in made]


def close_ring(row: list[Peer], spare: Sequence[Peer], replicas: int = 1) -> list[Peer]:
    """The row with its last worker changed for another one, if that keeps more neighbours apart: its ends meet, too."""
    best, last = row, len(row) - 1
    crowded, tries = _crowding(row, replicas), MOST_LOOKED_AT // len(row)
    swapped = (_swapped(row, index, last) for index in range(1, last))
    changed = ([*row[:last], peer] for peer in spare)
    for other in islice(chain(swapped, changed), tries):
        if not any(crowded[:-1]):
            break
        if (found := _crowding(other, replicas)) < crowded:
            best, crowded = other, found
    return best


def _swapped(row: list[Peer], one: int, other: int) -> list[Peer]:
    swapped = list(row)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


def _crowding(row: Sequence[Peer], replicas: int) -> Crowding:
    """How many stages have all their holders in one zone, how many in two, and so on; less is better.

    Then how many have another shadow than the worker before, and how many other replicas than those before.
    """
    workers, zones = [p.worker for p in row], {p.worker: p.zone for p in row}
    count = max(1, replicas)
    found = [0] * count
    kept_replicas = replicas_in(workers, count, zones)
    for worker, kept in zip(workers, kept_replicas, strict=True):
        spread = len({zones[w] for w in (worker, *kept)})
        if spread <= count:
            found[spread - 1] += 1
    nearest = [tuple(islice(_before(workers, stage), count)) for stage in range(len(workers))]
    pairs = list(zip(kept_replicas, nearest, strict=True))
    return (*found, sum(kept[:1] != near[:1] for kept, near in pairs), sum(kept != near for kept, near in pairs))


def replicas_in(
    row: Sequence[WorkerId], count: int, zones: Mapping[WorkerId, str], leaving: Container[WorkerId] = ()
) -> tuple[tuple[WorkerId, ...], ...]:
    """For each stage of a pipeline the workers of it that keep its replicas, the shadow first; fewer if it has no more.

    The nearest predecessors in the ring, so that each worker keeps as many. If several of them are in too few zones,
    others are taken, provided that every stage is then in as many zones as may be, and nobody keeps more than one more.
    """
    nearest = tuple(tuple(islice(_staying(row, s, leaving), count)) for s in range(len(row)))
    if count < 2:
        return nearest
    goal = min(count + 1, len({zones.get(w, "") for w in row if w not in leaving}))
    if all(len({zones.get(w, "") for w in (row[s], *kept)}) >= goal for s, kept in enumerate(nearest)):
        return nearest
    return _spread(row, count, zones, leaving, goal) or nearest


def _spread(
    row: Sequence[WorkerId], count: int, zones: Mapping[WorkerId, str], leaving: Container[WorkerId], goal: int
) -> tuple[tuple[WorkerId, ...], ...] | None:
    """Replicas of which every stage has some in that many zones, with its owner's; None if that is not found."""
    load: Counter[WorkerId] = Counter()
    found = []
    for stage, owner in enumerate(row):
        others = [w for w in islice(_staying(row, stage, leaving), REACH) if load[w] <= count]
        taken = {zones.get(owner, "")}
        chosen = set[WorkerId]()
        for worker in others:
            if zones.get(worker, "") not in taken and len(chosen) < count:
                taken.add(zones.get(worker, ""))
                chosen.add(worker)
        if len(taken) < goal:
            return None
        chosen |= set([w for w in others if w not in chosen][: count - len(chosen)])
        load.update(chosen)
        found.append(tuple(w for w in others if w in chosen))
    return tuple(found)


def _staying(row: Sequence[WorkerId], stage: int, leaving: Container[WorkerId]) -> Iterator[WorkerId]:
    return (w for w in _before(row, stage) if w not in leaving)


def _before(row: Sequence[WorkerId], stage: int) -> Iterator[WorkerId]:
    """The other workers of a pipeline, the nearest predecessor of that stage's first."""
    seen = {row[stage]}
    for back in range(1, len(row)):
        worker = row[(stage - back) % len(row)]
        if worker not in seen:
            seen.add(worker)
            yield worker
