"""What moves when the layers are split anew: who gets which place, and what is copied to newcomers before. Pure.

Everybody else waits while layers move, and most of all for the worker that lacks most. So places go to workers that
have most of what these need, and workers that run nothing get copies of stages beforehand, while training goes on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Final

import msgspec

from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, WorkerId
from bamboo_core.planning.ring import share_nodes

Held = Mapping[WorkerId, Set[int]]  # the layers that each worker has
MOSTLY: Final = 0.5  # of a stage, that a worker must need so that it gets a copy of the whole stage beforehand


def needed(plan: Plan, worker: WorkerId) -> frozenset[int]:
    """The layers of all that a worker runs or keeps a replica of."""
    cells = (*plan.owned_by(worker), *plan.replicated_by(worker))
    return frozenset(layer for cell in cells for layer in range(*plan.stages[cell.stage]))


def lacking(plan: Plan, held: Held, sizes: Sequence[float]) -> dict[WorkerId, float]:
    """The bytes that each worker with a part needs and does not have. sizes: bytes of each layer's state."""
    return {
        worker: sum(sizes[layer] for layer in needed(plan, worker) - held.get(worker, frozenset()))
        for worker in sorted(plan.holders())
    }


def placed(plan: Plan, peers: Sequence[Peer], held: Held, sizes: Sequence[float]) -> Plan:
    """The plan with workers in other places, so that who lacks most lacks as little as possible, or the same plan.

    peers: who may have a place. Places stay in their zones, and on their nodes if workers share these, so neighbours
    are where the plan wants them. The pairs of worker and place that save most come first; what comes of that is taken
    if it is better.
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
    """The worker that gets each seat, which is called by who has it in the plan; the pair with the most bytes already
    there comes first.

    Places that need the same and workers that have the same are looked at once.
    """
    wanting: dict[frozenset[int], list[WorkerId]] = {}
    having: dict[frozenset[int], list[WorkerId]] = {}
    for seat in seats:
        wanting.setdefault(needed(plan, seat), []).append(seat)
    for worker in workers:
        having.setdefault(frozenset(held.get(worker, ())), []).append(worker)
    pairs = [(sum(sizes[i] for i in need & has), need, has) for need in wanting for has in having]
    found: dict[WorkerId, WorkerId] = {}
    for _, need, has in sorted(pairs, key=lambda pair: -pair[0]):
        while wanting[need] and having[has]:
            found[wanting[need].pop(0)] = having[has].pop(0)
    return found


def renamed(plan: Plan, names: Mapping[WorkerId, WorkerId]) -> Plan:
    """The plan with other workers in the places of these; who would keep a replica of its own cell keeps none."""

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
    """The workers that become replicas of cells of the plan before the job goes on with the other one, by cell.

    spare: those that run nothing now. Each gets the stages whose layers it will mostly need, or the one of which it
    needs most, as far as it has room for their states beside what it keeps anyway. Pipelines take turns, so that no
    owner fills all of them.
    """
    found: dict[Cell, tuple[WorkerId, ...]] = {}
    for number, worker in enumerate(w for w in spare if w in onward.holders()):
        for stage in _worth_having(plan, needed(onward, worker), sizes, partial(has_room, worker)):
            cell = Cell(number % plan.target.pipelines, stage)
            found[cell] = (*found.get(cell, ()), worker)
    return found


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
