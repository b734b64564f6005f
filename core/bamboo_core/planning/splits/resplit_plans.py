"""Re-split: the plan that divides the layers anew over the live workers, for any number of stages.

A re-split ends the states of all stages at one step (a cut) and begins new states from the layers that the workers hold
in memory; so any grid can follow any other, and nothing is repeated.

All workers wait while layers move, above all for the worker that lacks most. So a cell goes to a worker that already
has most of its layers, and idle workers get copies of stages in advance, while training goes on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.job.spec import JobSpec, PipelineSchedule
from bamboo_core.planning.grid import grouped, initial_plan, layer_ranges
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, WorkerId
from bamboo_core.planning.ring import share_nodes
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.splits.speeds import MOST_WEIGHED_LAYERS, Ranges, WorkEstimate, uneven_split
from bamboo_core.text import count

Held = Mapping[WorkerId, Set[int]]  # the layers that each worker has
MOSTLY: Final = 0.5  # the part of a stage that a worker must need to get a copy of the whole stage in advance


def needed(plan: Plan, worker: WorkerId) -> frozenset[int]:
    """Return the layers of all stages that a worker runs or keeps a replica of."""
    cells = (*plan.owned_by(worker), *plan.replicated_by(worker))
    return frozenset(layer for cell in cells for layer in range(*plan.stages[cell.stage]))


def lacking(plan: Plan, held: Held, sizes: Sequence[float]) -> dict[WorkerId, float]:
    """Return the bytes of state that each owner or replica of the plan lacks. sizes: bytes of each layer's state."""
    return {
        worker: sum(sizes[layer] for layer in needed(plan, worker) - held.get(worker, frozenset()))
        for worker in sorted(plan.holders())
    }


def placed(plan: Plan, peers: Sequence[Peer], held: Held, sizes: Sequence[float]) -> Plan:
    """Return the plan with workers exchanged so that they lack fewer bytes: the most that any worker lacks counts
    first, then the sum over all. Return the same plan if the exchange is no better.

    Greedy: the pair of worker and seat (a worker's cells and replicas) with the most bytes already held comes first.
    Seats stay in their zones, and on their nodes if workers share nodes, so neighbours stay apart. peers: the workers
    to choose from.
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
    """Return a worker for each seat (cells and replicas of one worker). Pairs with the most bytes already held come
    first. Equal seats, and workers with equal layers, are compared once.
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
    """Return the plan with each owner and replica replaced by its value in `names`; `workers` stays. A worker that
    would both own and replicate a cell only owns it.
    """

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
    """Choose the replicas that spare workers receive in advance, before the job continues under the plan `onward`.
    Return the workers by cell.

    A spare worker that holds a stage in `onward` gets replicas of the present stages that it will mostly need (at least
    the share MOSTLY of their bytes), and of the stage with the most bytes that it will need. has_room: returns whether
    a worker has memory for these stages in addition to the replicas that it keeps anyway. sizes: bytes of each layer,
    or equal weights. The pipelines take turns as sources, so that their owners share the sending.
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


Sources = tuple[tuple[WorkerId, ...], ...]
MOST_SOURCES = 4  # that a plan names for a layer
NOTHING_HELD: Final[Held] = MappingProxyType({})


class Grid(NamedTuple):
    """The grid of a job: stages, pipelines, and the schedule."""

    stages: int
    pipelines: int
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B

    @property
    def cells(self) -> int:
        return self.stages * self.pipelines

    @property
    def name(self) -> str:
        return f"{count(self.pipelines, 'pipeline')} of {count(self.stages, 'stage')}"


def grid_of(plan: Plan) -> Grid:
    return Grid(len(plan.stages), plan.target.pipelines, plan.target.schedule)


class Beginning(NamedTuple):
    """The state that a plan begins with, and which workers hold its layers."""

    state: CheckpointId
    sources: Sources
    moved: bool = True  # the workers hold it; else it is a checkpoint of the store
    # the layers of each stage, if decided with the cut; valid as long as every worker keeps its place
    stages: Ranges | None = None
    held: Held = NOTHING_HELD  # all layers that workers have of it; `sources` names a part
    sizes: Sequence[float] = ()  # bytes of each layer, to move few bytes; empty if unknown


def holders_of(held: Mapping[WorkerId, Set[int]], layers: int, live: Mapping[WorkerId, Peer]) -> Sources:
    """Return the live workers that hold each layer, at most MOST_SOURCES for each. layers: number in the model."""
    return tuple(tuple(w for w in live if layer in held.get(w, ()))[:MOST_SOURCES] for layer in range(layers))


def sources_of(held: Mapping[WorkerId, Set[int]], layers: int, live: Mapping[WorkerId, Peer]) -> Sources | None:
    """Return the same as `holders_of`, but None if a layer has no holder."""
    sources = holders_of(held, layers, live)
    return sources if all(sources) else None


def resplit_plan(
    plan: Plan,
    grid: Grid,
    spec: JobSpec,
    work: WorkEstimate,
    staying: Sequence[Peer],
    live: Sequence[Peer],
    beginning: Beginning,
    may_be: Callable[[Ranges], bool] = lambda split: True,
    instead: Ranges | None = None,
) -> Plan:
    """Return the plan that continues from the state `beginning` on a grid, with the layers split anew.

    With fewer workers than cells, some workers run several cells; if grid and workers stay, each keeps its cell. plan:
    the plan in force. staying: the workers that may get cells. live: all workers, including workers that only send
    layers. may_be: returns whether memory suffices for a split; if not, `instead` is used unless it is None.
    """
    ranges = layer_ranges(work.costs, spec.topology, grid.stages, spec.worker.devices)
    if instead is not None and not may_be(ranges):
        ranges = instead
    seats = _seats(_in_order(plan, staying), grid.stages * grid.pipelines)
    begun = initial_plan(
        [msgspec.structs.replace(peer, worker=seat) for seat, peer in seats.items()],
        ranges,
        grid.pipelines,
        spec.training,
        spec.redundancy,
        epoch=plan.epoch + 1,
        restore=beginning.state,
        spread=spec.spread.policy,
        schedule=grid.schedule,
    )
    begun = renamed(begun, {seat: peer.worker for seat, peer in seats.items()})
    if beginning.held and len(staying) >= grid.cells:
        begun = placed(begun, staying, beginning.held, beginning.sizes or [1.0] * len(work.costs))
    stages = None
    if keeps_its_seats(plan, {peer.worker for peer in staying}, {peer.worker for peer in live}, grid):
        begun, stages = msgspec.structs.replace(begun, pipelines=plan.pipelines), beginning.stages
    step, moved = beginning.state.step, beginning.moved
    note = f"the layers are split anew after step {step}" if moved else f"going back again to the state of step {step}"
    stages = stages or balanced(begun, spec, work)
    if instead is not None and not may_be(stages):
        stages = instead
    return msgspec.structs.replace(
        begun,
        stages=stages,
        device_layers=device_layers(spec, stages, work.costs),
        moved=moved,
        sources=beginning.sources,
        workers=tuple(live),
        reason="Resplitting" if moved else "RollingBack",
        message=f"{note}, for {grid.name}",
    )


def balanced(plan: Plan, spec: JobSpec, work: WorkEstimate) -> Ranges:
    """Return the layers of each stage that minimise the longest stage over all pipelines, given the workers' speeds.
    Return the plan's own split if the manifest sets the split, if no worker's speed is known, or for a model with more
    than MOST_WEIGHED_LAYERS layers.
    """
    if spec.topology.split is not None or not work.slowness or len(work.costs) > MOST_WEIGHED_LAYERS:
        return plan.stages
    shares, devices = [len(part) for part in plan.target.split], spec.worker.devices
    weights = [
        max(share * work.slowness.get(plan.at(Cell(d, s)).owner, 1.0) for d, share in enumerate(shares))
        for s in range(len(plan.stages))
    ]
    each = [weight for weight in weights for _ in range(devices)]
    return grouped(uneven_split(work.costs, each, work.fixed(len(each))), devices)


def keeps_its_seats(plan: Plan, staying: Collection[WorkerId], live: Collection[WorkerId], grid: Grid) -> bool:
    """Return whether cells keep their workers: same grid, one layout, one cell per owner, owners stay, holders live."""
    owners = [plan.at(cell).owner for cell in plan.cells()]
    all_stay = set(owners) <= set(staying) and plan.holders() <= set(live)
    return all_stay and grid == grid_of(plan) and len(plan.layouts) == 1 and len(set(owners)) == len(owners)


def _seats(peers: Sequence[Peer], cells: int) -> dict[WorkerId, Peer]:
    """Return the workers by seat, a unique name: one seat per worker, or one per cell if workers must run several."""
    if len(peers) >= cells:
        return {peer.worker: peer for peer in peers}
    return {f"seat {i}": peers[i * len(peers) // cells] for i in range(cells)}


def _in_order(plan: Plan, peers: Sequence[Peer]) -> list[Peer]:
    """Sort the workers so that few layers move: owners first, in the order of their first cells."""
    place: dict[WorkerId, Cell] = {}
    for cell in plan.cells():
        place.setdefault(plan.at(cell).owner, cell)
    last = Cell(len(plan.pipelines), 0)
    return sorted(peers, key=lambda peer: place.get(peer.worker, last))


def in_places(plan: Plan, peers: Sequence[Peer], cells: int) -> list[Peer]:
    """Sort the workers so that an owner's index is that of its cell among the first `cells`; others fill the gaps."""
    order = {cell: i for i, cell in enumerate(plan.cells()[:cells])}
    seats: dict[int, Peer] = {}
    for peer in peers:
        place = next((order[cell] for cell in plan.owned_by(peer.worker) if cell in order), None)
        if place is not None:
            seats[place] = peer
    others = [peer for peer in peers if peer not in seats.values()]
    seated = [seats.get(i) or (others.pop(0) if others else None) for i in range(cells)]
    return [*(peer for peer in seated if peer), *others]


def moved_plan(plan: Plan, live: Sequence[Peer], stopped: float | None) -> Plan:
    """Return the plan that follows once every worker has the layers that it needs: the same plan without sources.
    stopped: seconds during which no step could begin; None if unknown.
    """
    message = f"the job runs {grid_of(plan).name}"
    if not plan.moved:
        here, layers = sum(1 for holders in plan.sources if holders), len(plan.sources)
        message += f" with the checkpoint of step {plan.first_step}: {here} of {count(layers, 'layer')} from memory"
    message += "" if stopped is None else f", after {stopped:.2f} s in which layers moved"
    return msgspec.structs.replace(
        plan,
        epoch=plan.epoch + 1,
        sources=(),
        workers=tuple(live),
        boundary=False,
        reason="Resplit" if plan.moved else "RolledBack",
        message=message,
    )
