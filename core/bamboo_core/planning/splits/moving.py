"""Moving layers in a re-split: which worker gets which place, and what newcomers are sent in advance. Pure.

All workers wait while layers move, above all for the worker that lacks most. So places go to workers that have most of
the layers they need, and idle workers get copies of stages in advance, while training goes on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Final

import msgspec

from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, WorkerId
from bamboo_core.planning.ring import share_nodes

Held = Mapping[WorkerId, Set[int]]  # the layers that each worker has
MOSTLY: Final = 0.5  # the part of a stage that a worker must need to get a copy of the whole stage in advance


def needed(plan: Plan, worker: WorkerId) -> frozenset[int]:
    """Return the layers of all stages that a worker runs or keeps a replica of."""
    cells = (*plan.owned_by(worker), *plan.replicated_by(worker))
    return frozenset(layer for cell in cells for layer in range(*plan.stages[cell.stage]))


def lacking(plan: Plan, held: Held, sizes: Sequence[float]) -> dict[WorkerId, float]:
    """Return the bytes that each worker with a part needs and does not have. sizes: bytes of each layer's state."""
    return {
        worker: sum(sizes[layer] for layer in needed(plan, worker) - held.get(worker, frozenset()))
        for worker in sorted(plan.holders())
    }


def placed(plan: Plan, peers: Sequence[Peer], held: Held, sizes: Sequence[float]) -> Plan:
    """Return the plan with workers swapped so that the worker that lacks most lacks least; the same plan if no swap
    helps.

    Greedy: pairs of worker and place that save most come first. Places stay in their zones, and on their nodes if
    workers share nodes, so neighbours stay apart as planned. peers: the workers that may have a place.
    """
    known, shared = {peer.worker: peer for peer in peers}, share_nodes(peers)
    owners = list(dict.fromkeys(plan.at(cell).owner for cell in plan.cells()))

    def where(worker: WorkerId) -> tuple[str, str]:
        return known[worker].zone, known[worker].node if shared else ""

    names: dict[WorkerId, WorkerId] = {}
    for place in dict.fromkeys(map(where, owners)):
        seats = [worker for worker in owners if where(worker) == place]
        names |= _matched(plan, seats, [worker for worker in known if where(worker) == place], held, sizes)
    other = renamed(plan, names)
    return min((plan, other), key=lambda one: _burden(lacking(one, held, sizes).values()))


def _burden(bytes_lacking: Collection[float]) -> tuple[float, float]:
    return max(bytes_lacking, default=0.0), sum(bytes_lacking)


def _matched(
    plan: Plan, seats: Sequence[WorkerId], workers: Sequence[WorkerId], held: Held, sizes: Sequence[float]
) -> dict[WorkerId, WorkerId]:
    """Assign workers to seats, the pair that already holds the most bytes first. A seat is named by its worker in the
    plan. Seats with equal needs, and workers with equal layers, are compared once.
    """
    wanting: dict[frozenset[int], list[WorkerId]] = {}
    having: dict[frozenset[int], list[WorkerId]] = {}
    for seat in seats:
        wanting.setdefault(needed(plan, seat), []).append(seat)
    for worker in workers:
        having.setdefault(frozenset(held.get(worker, ())), []).append(worker)
    pairs = [(sum(sizes[i] for i in need & has), need, has) for need in wanting for has in having]
    seated: dict[WorkerId, WorkerId] = {}
    for _, need, has in sorted(pairs, key=lambda pair: -pair[0]):
        while wanting[need] and having[has]:
            seated[wanting[need].pop(0)] = having[has].pop(0)
    return seated


def renamed(plan: Plan, names: Mapping[WorkerId, WorkerId]) -> Plan:
    """Return the plan with workers replaced by name; a worker that would replicate its own cell does not."""

    def held(cell: Assignment) -> Assignment:
        owner = names[cell.owner]
        replicas = dict.fromkeys(names[w] for w in cell.replicas)
        return Assignment(owner=owner, replicas=tuple(w for w in replicas if w != owner))

    return msgspec.structs.replace(plan, pipelines=tuple(tuple(map(held, row)) for row in plan.pipelines))


def filled_before(
    plan: Plan,
    onward: Plan,
    spare: Sequence[WorkerId],
    sizes: Sequence[float],
    has_room: Callable[[WorkerId, tuple[int, ...]], bool],
) -> dict[Cell, tuple[WorkerId, ...]]:
    """Return the idle workers that become replicas of the plan's cells before the job goes on with `onward`, by cell.

    spare: workers that run nothing now. Each gets the stages whose layers it will mostly need, or the one it needs most
    of, as far as it has room for them in addition to what it keeps. Pipelines take turns, so no owner fills all of
    them.
    """
    replicas: dict[Cell, tuple[WorkerId, ...]] = {}
    for number, worker in enumerate(w for w in spare if w in onward.holders()):
        for stage in _worth_having(plan, needed(onward, worker), sizes, partial(has_room, worker)):
            cell = Cell(number % plan.target.pipelines, stage)
            replicas[cell] = (*replicas.get(cell, ()), worker)
    return replicas


def _worth_having(
    plan: Plan, layers: Set[int], sizes: Sequence[float], has_room: Callable[[tuple[int, ...]], bool]
) -> list[int]:
    def size(some: Collection[int]) -> float:
        return sum(sizes[layer] for layer in some)

    useful = {stage: size(layers & set(range(*ends))) for stage, ends in enumerate(plan.stages)}
    ranked = sorted((stage for stage in useful if useful[stage]), key=lambda stage: -useful[stage])
    chosen: list[int] = []
    for stage in ranked:
        mostly = useful[stage] >= MOSTLY * size(range(*plan.stages[stage]))
        if (mostly or stage == ranked[0]) and has_room((*chosen, stage)):
            chosen.append(stage)
    return chosen
