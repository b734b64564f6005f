"""Pipelines as rings of workers: who follows whom, and who keeps the replicas of whose state. Pure.

The worker before a stage's owner knows the stage's inputs, because it computes them, so it is the stage's shadow. With
several replicas those before it come next: they are far enough in the ring that neighbours may be lost at once. Workers
of a node are lost together, and those of a zone may be: neighbours are on different nodes, and in different zones,
where that is possible.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.planning.plan import OwnerSpread, Peer, WorkerId

MOST_LOOKED_AT = 4096  # stages of all changes to a row that are tried: 64 changes of 64 stages
REACH = 12  # predecessors that may keep a stage's replicas for the sake of nodes and zones

Crowding = tuple[int, ...]
Row = list[Peer]
Goal = tuple[Mapping[WorkerId, str], int]  # the place of each worker, and in how many of them a stage should be


def ring(peers: Sequence[Peer], size: int, apart: int = 1) -> Row:
    """Choose and order `size` workers so that neighbours sit in different zones where that is possible.

    Greedy: always take from the zone with the most workers left that none of the `apart` workers before is in; else
    from one that fewer of them are in. Which of a zone's workers, their nodes decide in the same way.
    """
    left: dict[str, dict[str, Row]] = {}
    for peer in peers:
        left.setdefault(peer.zone, {}).setdefault(peer.failure_domain, []).append(peer)
    counts, shared = Counter(peer.zone for peer in peers), share_nodes(peers)
    chosen: Row = []
    while len(chosen) < size:
        near = chosen[len(chosen) - min(apart, len(chosen)) :]
        zone = _farthest(dict(sorted(counts.items())), [p.zone for p in near])
        nodes = left[zone]
        node = next(iter(nodes))
        if shared:
            node = _farthest({name: len(them) for name, them in nodes.items()}, [p.failure_domain for p in near])
        chosen.append(nodes[node].pop(0))
        counts -= Counter([zone])
        if not nodes[node]:
            del nodes[node]
    return chosen


def _farthest(left: Mapping[str, int], before: Sequence[str]) -> str:
    """The domain of the next worker, of those with so many workers left: one that nobody before is in, else who is not
    near; of these the fullest.
    """
    near = {place: at for at, place in enumerate(before, 1)}
    return min(left, key=lambda place: (near.get(place, 0), -left[place]))


def rows(
    peers: Sequence[Peer], depth: int, pipelines: int, replicas: int, spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
) -> list[list[WorkerId]]:
    """Each pipeline's workers, in the order of its stages: so that as many nodes and zones as may be can be lost at
    once, or so that as few neighbours as may be are in different zones.
    """
    if spread.packs:
        return packed(peers, depth, pipelines, spread)
    if depth == 1 < pipelines and share_nodes(peers):
        return [[worker] for worker in rows(peers, pipelines, 1, replicas)[0]]
    size, reach = depth * pipelines, range(max(1, replicas), 0, -1)
    orders = [ring(peers, size, apart) for apart in reach]
    if share_nodes(peers):
        orders += [ring(_without_zones(peers), size, apart) for apart in reach]
        orders.append([peer for row in dealt(peers, depth, pipelines) for peer in row])
    known = {peer.worker: peer for peer in peers}
    found = (_arranged([known[p.worker] for p in order], peers, depth, pipelines, replicas) for order in orders)
    return min(found)[2]


def are_apart(spread: Iterable[OwnerSpread], copies: int) -> bool:
    """Do the owners of each stage in all pipelines hold that many copies beside one, so that any that many workers,
    nodes and zones may be lost, as far as the workers have that many?
    """
    return all(one.least >= min(copies + 1, one.there) for one in spread)


def share_nodes(peers: Sequence[Peer]) -> bool:
    return len({peer.failure_domain for peer in peers}) < len(peers)


def _without_zones(peers: Sequence[Peer]) -> list[Peer]:
    return [msgspec.structs.replace(peer, zone="") for peer in peers]


def dealt(peers: Sequence[Peer], depth: int, pipelines: int) -> list[Row]:
    """Rows with as few neighbours on the same node as there can be.

    As few workers as may be of the fullest nodes; each node's are dealt to the pipelines in turn, and in each of them
    they have every other place.
    """
    nodes: dict[str, Row] = {}
    for peer in peers:
        nodes.setdefault(peer.failure_domain, []).append(peer)
    size, level = depth * pipelines, 1
    while sum(min(len(workers), level) for workers in nodes.values()) < size:
        level += 1
    taken = {node: min(len(workers), level) for node, workers in nodes.items()}
    surplus = sum(taken.values()) - size
    for node in sorted((n for n in nodes if taken[n] == level), key=lambda n: len(nodes[n]))[:surplus]:
        taken[node] -= 1
    order = [peer for node in sorted(nodes, key=lambda n: -taken[n]) for peer in nodes[node][: taken[node]]]
    return [_every_other(order[number::pipelines]) for number in range(pipelines)]


def _every_other(workers: Row) -> Row:
    """These workers in another order: those of a node one after the other at positions 0, 2, ... and then 1, 3, ..."""
    sizes = Counter(peer.failure_domain for peer in workers)
    grouped = sorted(workers, key=lambda peer: (-sizes[peer.failure_domain], peer.failure_domain))
    places = [*range(0, len(workers), 2), *range(1, len(workers), 2)]
    return [peer for _, peer in sorted(zip(places, grouped, strict=True), key=lambda pair: pair[0])]


def packed(
    peers: Sequence[Peer], depth: int, pipelines: int, spread: SpreadPolicy, taken: Collection[str] = ()
) -> list[list[WorkerId]]:
    """Each pipeline in one zone where that is possible, else in few, those of a zone side by side.

    Pipelines share a zone with SingleZone, the one with the most workers, and with ZonePerPipeline only if the others
    have too few. taken: zones of pipelines that there are already.
    """
    left: dict[str, Row] = {}
    for peer in peers:
        left.setdefault(peer.zone, []).append(peer)
    used, shared = set(taken), spread is SpreadPolicy.SINGLE_ZONE
    whole = max(left.values(), key=len, default=[])
    if shared and share_nodes(whole) and len(whole) >= depth * pipelines:
        return [[peer.worker for peer in row] for row in dealt(whole, depth, pipelines)]
    found: list[list[WorkerId]] = []
    for _ in range(pipelines):
        row: list[WorkerId] = []
        while len(row) < depth:
            lacking = depth - len(row)
            enough = [zone for zone in left if len(left[zone]) >= lacking]
            zones = sorted(enough or left, key=lambda z: len(left[z]) if shared or not enough else 0, reverse=True)
            zone = next((z for z in zones if (z in used) is shared), zones[0]) if enough else zones[0]
            chosen = _apart(left[zone], min(lacking, len(left[zone])))
            row += [peer.worker for peer in chosen]
            left[zone] = [peer for peer in left[zone] if peer not in chosen]
            used.add(zone)
        found.append(row)
    return found


def _apart(peers: Row, size: int) -> Row:
    """That many workers of one zone, with as few neighbours on the same node as may be."""
    return dealt(peers, size, 1)[0] if share_nodes(peers) else peers[:size]


def _arranged(
    order: Sequence[Peer], peers: Sequence[Peer], depth: int, pipelines: int, replicas: int
) -> tuple[Crowding, tuple[Crowding, ...], list[list[WorkerId]]]:
    """The rows from a ring, and before them, for the comparison with others, how crowded the holders of their stages
    are: on nodes in all rows, then in each.
    """
    made: list[Row] = []
    used = {p.worker for p in order}
    spare = [p for p in peers if p.worker not in used]
    for d in range(pipelines):
        taken = {p.worker for p in made[-1]} - used if made else set()
        spare = [p for p in spare if p.worker not in taken] if taken else spare
        made.append(close_ring(list(order[d * depth : (d + 1) * depth]), spare, replicas))
    crowding = [_crowding(row, replicas) for row in made]
    on_nodes = tuple(map(sum, zip(*(row[: max(1, replicas) + 1] for row in crowding), strict=True)))
    return on_nodes, tuple(crowding), [[p.worker for p in row] for row in made]


def close_ring(row: list[Peer], spare: Sequence[Peer], replicas: int = 1) -> list[Peer]:
    """The row with its last worker changed for another one, if that keeps more neighbours apart: its ends meet, too."""
    if len({peer.zone for peer in (*row, *spare)}) <= 1 and not share_nodes((*row, *spare)):
        return row  # all are alike
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
    """How many stages have all their holders on one node, how many on two, and so on; less is better. Then how many
    share a node with the worker before; how many have all their holders in one zone, in two, and so on.

    Then how many have another shadow than the worker before, and how many other replicas than those before.
    """
    workers, peers = [p.worker for p in row], {p.worker: p for p in row}
    count = max(1, replicas)
    on_nodes, in_zones = [0] * count, [0] * count
    kept_replicas = replicas_in(workers, count, peers)
    for worker, kept in zip(workers, kept_replicas, strict=True):
        holders = [peers[w] for w in (worker, *kept)]
        for found, spread in (
            (on_nodes, len({p.failure_domain for p in holders})),
            (in_zones, len({p.zone for p in holders})),
        ):
            if spread <= count:
                found[spread - 1] += 1
    nearest = [tuple(islice(_before(workers, stage), count)) for stage in range(len(workers))]
    pairs = list(zip(kept_replicas, nearest, strict=True))
    moved, others = sum(kept[:1] != near[:1] for kept, near in pairs), sum(kept != near for kept, near in pairs)
    together = sum(row[s - 1].failure_domain == peer.failure_domain for s, peer in enumerate(row)) * (len(row) > 1)
    return (*on_nodes, together, *in_zones, moved, others)


def replicas_in(
    row: Sequence[WorkerId], count: int, peers: Mapping[WorkerId, Peer], leaving: Container[WorkerId] = ()
) -> tuple[tuple[WorkerId, ...], ...]:
    """The workers that keep replicas of each stage of a pipeline, taken from that pipeline, the shadow first; fewer
    than `count` if it has no more.

    The nearest predecessors in the ring, so that each worker keeps as many. If several of them are on too few nodes, or
    in too few zones, others are taken, provided that every stage is then on as many nodes, and in as many zones, as may
    be, and nobody keeps more than one more; else so that as many stages as possible are on another node, too.
    """
    nearest = tuple(tuple(islice(_staying(row, s, leaving), count)) for s in range(len(row)))
    nodes = {w: peers[w].failure_domain if w in peers else f"/{w}" for w in row}
    zones = {w: peers[w].zone if w in peers else "" for w in row}
    staying = {w for w in row if w not in leaving}
    goals: list[Goal] = [(nodes, min(count + 1, len({nodes[w] for w in staying})))]
    if count > 1:
        goals.insert(0, (zones, min(count + 1, len({zones[w] for w in staying}))))
    held = [(row[s], *kept) for s, kept in enumerate(nearest)]
    if all(_are_met(goals, holders) for holders in held):
        return nearest
    spread = _spread(row, count, goals, leaving)
    if spread is None and not all(_are_met(goals[-1:], holders) for holders in held):
        spread = _spread(row, count, [(nodes, 1)], leaving)
    return spread or nearest


def _are_met(goals: Sequence[Goal], holders: Sequence[WorkerId]) -> bool:
    return all(len({place[w] for w in holders}) >= least for place, least in goals)


def _spread(
    row: Sequence[WorkerId], count: int, goals: Sequence[Goal], leaving: Container[WorkerId]
) -> tuple[tuple[WorkerId, ...], ...] | None:
    """Replicas of which every stage has some in that many places, with its owner's; None if that is not found.

    Stages for which the nearest will do come first.
    """
    load: Counter[WorkerId] = Counter()
    nearest = [tuple(islice(_staying(row, s, leaving), count)) for s in range(len(row))]
    found: dict[int, tuple[WorkerId, ...]] = {}
    for stage in sorted(range(len(row)), key=lambda s: not _are_met(goals, (row[s], *nearest[s]))):
        others = [w for w in islice(_staying(row, stage, leaving), REACH) if load[w] <= count]
        chosen: list[WorkerId] = []
        for place, _ in goals:
            for worker in others:
                if len(chosen) < count and place[worker] not in {place[w] for w in (row[stage], *chosen)}:
                    chosen.append(worker)
        if not _are_met(goals, (row[stage], *chosen)):
            return None
        more = [*others, *_staying(row, stage, leaving)]
        chosen += [w for w in dict.fromkeys(more) if w not in chosen][: count - len(chosen)]
        load.update(chosen)
        found[stage] = tuple(w for w in _staying(row, stage, leaving) if w in chosen)
    return tuple(found[stage] for stage in range(len(row)))


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
