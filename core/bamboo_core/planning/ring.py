"""Pipelines as rings of workers: the order of the workers, and the choice of workers that keep replicas. Pure.

The worker before a stage's owner computes the stage's inputs, so it is the stage's shadow; the first stage's shadow is
the last stage's owner. Further replicas go to the workers before that one, so that several neighbours may be lost at
once. Workers of a node are lost together, and workers of a zone may be: where possible, neighbours are on different
nodes, and in different zones unless the spread policy packs pipelines into zones.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.planning.plan import OwnerSpread, Peer, WorkerId

MOST_LOOKED_AT = 4096  # stages in all changes to a row that are tried: 64 changes of 64 stages
REACH = 12  # predecessors that may keep a stage's replicas to spread them over nodes and zones

Crowding = tuple[int, ...]
Row = list[Peer]
Goal = tuple[Mapping[WorkerId, str], int]  # the place of each worker, and the number of places a stage should be in


def ring(peers: Sequence[Peer], size: int, apart: int = 1) -> Row:
    """Choose and order `size` workers so that neighbours are in different zones where possible.

    Greedy: the next worker comes from a zone with none of the last `apart` workers (the one with most workers left),
    else from the zone that was chosen longest ago. Nodes within a zone are chosen in the same way.
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
    """Return the zone or failure domain of the next worker: one that is absent from `before`, else the one whose last
    occurrence there is earliest; ties go to the one with the most workers left. left: workers left in each.
    """
    near = {place: at for at, place in enumerate(before, 1)}
    return min(left, key=lambda place: (near.get(place, 0), -left[place]))


def rows(
    peers: Sequence[Peer], depth: int, pipelines: int, replicas: int, spread: SpreadPolicy = SpreadPolicy.INTERLEAVE
) -> list[list[WorkerId]]:
    """Choose and arrange the workers of each pipeline, by stage. INTERLEAVE spreads neighbours so that as many nodes
    and zones as possible can be lost at once; the other policies keep neighbours in one zone where possible.
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
    arrangements = (_arranged([known[p.worker] for p in order], peers, depth, pipelines, replicas) for order in orders)
    return min(arrangements)[2]


def are_apart(spread: Iterable[OwnerSpread], copies: int) -> bool:
    """Return whether each stage's owners in all pipelines are spread over at least `copies` + 1 workers, nodes and
    zones, or over all of them if there are fewer. spread: as from `owner_spread`.
    """
    return all(one.least >= min(copies + 1, one.places) for one in spread)


def share_nodes(peers: Sequence[Peer]) -> bool:
    return len({peer.failure_domain for peer in peers}) < len(peers)


def _without_zones(peers: Sequence[Peer]) -> list[Peer]:
    return [msgspec.structs.replace(peer, zone="") for peer in peers]


def dealt(peers: Sequence[Peer], depth: int, pipelines: int) -> list[Row]:
    """Choose and arrange the workers of each pipeline, by stage, with as few neighbours on one node as possible. The
    largest number of workers of one node is minimal. A node's workers go to pipelines in turn, at every other stage.
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
    """Reorder the workers: node after node, the fullest first, they fill positions 0, 2, ... and then 1, 3, ..."""
    sizes = Counter(peer.failure_domain for peer in workers)
    grouped = sorted(workers, key=lambda peer: (-sizes[peer.failure_domain], peer.failure_domain))
    places = [*range(0, len(workers), 2), *range(1, len(workers), 2)]
    return [peer for _, peer in sorted(zip(places, grouped, strict=True), key=lambda pair: pair[0])]


def packed(
    peers: Sequence[Peer], depth: int, pipelines: int, spread: SpreadPolicy, taken: Collection[str] = ()
) -> list[list[WorkerId]]:
    """Choose and arrange the workers of each pipeline, by stage: in one zone if possible, else in few, with workers of
    a zone side by side.

    With SINGLE_ZONE pipelines share the zone with the most workers; with ZONE_PER_PIPELINE they share a zone only if
    the unused zones have too few workers. taken: zones of existing pipelines.
    """
    left: dict[str, Row] = {}
    for peer in peers:
        left.setdefault(peer.zone, []).append(peer)
    used, shared = set(taken), spread is SpreadPolicy.SINGLE_ZONE
    whole = max(left.values(), key=len, default=[])
    if shared and share_nodes(whole) and len(whole) >= depth * pipelines:
        return [[peer.worker for peer in row] for row in dealt(whole, depth, pipelines)]
    packed_rows: list[list[WorkerId]] = []
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
        packed_rows.append(row)
    return packed_rows


def _apart(peers: Row, size: int) -> Row:
    """Return `size` workers of one zone, with as few neighbours on the same node as possible."""
    return dealt(peers, size, 1)[0] if share_nodes(peers) else peers[:size]


def _arranged(
    order: Sequence[Peer], peers: Sequence[Peer], depth: int, pipelines: int, replicas: int
) -> tuple[Crowding, tuple[Crowding, ...], list[list[WorkerId]]]:
    """Cut a ring into one row per pipeline, and return two keys to compare rings, then the rows. The keys, where less
    is better: `_crowding`'s counts for nodes, summed over the rows; each row's `_crowding`.
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
    """Return the row with its last worker exchanged for another of the row or a spare one, if that lowers `_crowding`:
    the last worker and the first are neighbours too. Otherwise return the row itself.
    """
    if len({peer.zone for peer in (*row, *spare)}) <= 1 and not share_nodes((*row, *spare)):
        return row  # all workers are alike
    best, last = row, len(row) - 1
    crowded, tries = _crowding(row, replicas), MOST_LOOKED_AT // len(row)
    swapped = (_swapped(row, index, last) for index in range(1, last))
    changed = ([*row[:last], peer] for peer in spare)
    for other in islice(chain(swapped, changed), tries):
        if not any(crowded[:-1]):
            break
        if (other_crowding := _crowding(other, replicas)) < crowded:
            best, crowded = other, other_crowding
    return best


def _swapped(row: list[Peer], one: int, other: int) -> list[Peer]:
    swapped = list(row)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


def _crowding(row: Sequence[Peer], replicas: int) -> Crowding:
    """Return counts of crowded stages, the most important first; less is better.

    The counts: stages with all holders on one node, on two, and so on; stages on the same node as the stage before;
    stages with all holders in one zone, in two, and so on; stages whose shadow is not the worker before; and stages
    whose replicas are not the nearest workers before.
    """
    workers, peers = [p.worker for p in row], {p.worker: p for p in row}
    count = max(1, replicas)
    on_nodes, in_zones = [0] * count, [0] * count
    kept_replicas = replicas_in(workers, count, peers)
    for worker, kept in zip(workers, kept_replicas, strict=True):
        holders = [peers[w] for w in (worker, *kept)]
        for counts, spread in (
            (on_nodes, len({p.failure_domain for p in holders})),
            (in_zones, len({p.zone for p in holders})),
        ):
            if spread <= count:
                counts[spread - 1] += 1
    nearest = [tuple(islice(_before(workers, stage), count)) for stage in range(len(workers))]
    pairs = list(zip(kept_replicas, nearest, strict=True))
    moved, others = sum(kept[:1] != near[:1] for kept, near in pairs), sum(kept != near for kept, near in pairs)
    together = sum(row[s - 1].failure_domain == peer.failure_domain for s, peer in enumerate(row)) * (len(row) > 1)
    return (*on_nodes, together, *in_zones, moved, others)


def replicas_in(
    row: Sequence[WorkerId], count: int, peers: Mapping[WorkerId, Peer], leaving: Container[WorkerId] = ()
) -> tuple[tuple[WorkerId, ...], ...]:
    """Return the workers of a pipeline that keep replicas of each stage, the shadow first; fewer than `count` if the
    pipeline has too few other workers. leaving: workers that keep none.

    They are the nearest predecessors in the ring, so that each worker keeps equally many. If these are on too few nodes
    or, with several replicas, in too few zones, other workers with at most one extra replica each are chosen, provided
    that every stage is then on as many nodes and in as many zones as possible. If that fails, and the nearest are on
    too few nodes, others are chosen so that as many stages as possible are also on another node.
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
    """Choose replicas so that each stage's holders, owner included, meet the goals; None if the search fails. Stages
    whose nearest predecessors suffice come first.
    """
    load: Counter[WorkerId] = Counter()
    nearest = [tuple(islice(_staying(row, s, leaving), count)) for s in range(len(row))]
    replicas: dict[int, tuple[WorkerId, ...]] = {}
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
        replicas[stage] = tuple(w for w in _staying(row, stage, leaving) if w in chosen)
    return tuple(replicas[stage] for stage in range(len(row)))


def _staying(row: Sequence[WorkerId], stage: int, leaving: Container[WorkerId]) -> Iterator[WorkerId]:
    return (w for w in _before(row, stage) if w not in leaving)


def _before(row: Sequence[WorkerId], stage: int) -> Iterator[WorkerId]:
    """Yield the other workers of a pipeline, the stage's nearest predecessor first."""
    seen = {row[stage]}
    for back in range(1, len(row)):
        worker = row[(stage - back) % len(row)]
        if worker not in seen:
            seen.add(worker)
            yield worker
