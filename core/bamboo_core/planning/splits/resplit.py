"""The way to another number of stages: the layers split anew over the workers that are there, and the plan that begins
with that.

A re-split ends the states of all stages at one step (a cut) and begins others, from the layers that the workers hold
in memory; so any grid can follow any other, and nothing is repeated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from bamboo_core.job.spec import JobSpec, PipelineSchedule
from bamboo_core.planning.grid import grouped, initial_plan, layer_ranges
from bamboo_core.planning.plan import Cell, CheckpointId, Peer, Plan, WorkerId
from bamboo_core.planning.splits.devices import device_layers
from bamboo_core.planning.splits.moving import Held, placed, renamed
from bamboo_core.planning.splits.speeds import WorkEstimate
from bamboo_core.planning.splits.uneven_split import MOST_WEIGHED_LAYERS, Ranges, uneven_split
from bamboo_core.text import count

Sources = tuple[tuple[WorkerId, ...], ...]
MOST_SOURCES = 4  # of a layer, that a plan names
NOTHING_HELD: Final[Held] = MappingProxyType({})


class Grid(NamedTuple):
    """What a job runs: pipelines of stages, by a schedule."""

    stages: int
    pipelines: int
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B

    @property
    def cells(self) -> int:
        return self.stages * self.pipelines

    @property
    def told(self) -> str:
        return f"{count(self.pipelines, 'pipeline')} of {count(self.stages, 'stage')}"


def grid_of(plan: Plan) -> Grid:
    return Grid(len(plan.stages), plan.target.pipelines, plan.target.schedule)


class Beginning(NamedTuple):
    """The state that a plan begins with."""

    state: CheckpointId
    sources: Sources
    moved: bool = True  # it is one that workers hold, not a checkpoint of the store
    # the layers of each, if that was decided with the cut; it holds as long as everybody keeps its place
    stages: Ranges | None = None
    held: Held = NOTHING_HELD  # all that workers have of it, of which sources names a part
    sizes: Sequence[float] = ()  # bytes of each layer. By these few bytes move; of a checkpoint nobody may have any


def holders_of(held: Mapping[WorkerId, Set[int]], layers: int, live: Mapping[WorkerId, Peer]) -> Sources:
    """Who of the live workers holds each layer."""
    return tuple(tuple(w for w in live if layer in held.get(w, ()))[:MOST_SOURCES] for layer in range(layers))


def sources_of(held: Mapping[WorkerId, Set[int]], layers: int, live: Mapping[WorkerId, Peer]) -> Sources | None:
    """Who of the live workers holds each layer; None if nobody holds one of them."""
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
    """The plan that goes on from a state with that grid; fewer staying workers than it takes run several stages each.

    If the grid stays, everybody runs the stage that it ran. plan: the one in force. live: all who may be asked for
    layers. may_be: is there the memory for that split? Else it is `instead`.
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
    told = f"the layers are split anew after step {step}" if moved else f"going back again to the state of step {step}"
    stages = stages or balanced(begun, spec, work)
    if instead is not None and not may_be(stages):
        stages = instead
    return _changed(
        begun,
        stages=stages,
        device_layers=device_layers(spec, stages, work.costs),
        moved=moved,
        sources=beginning.sources,
        workers=tuple(live),
        reason="Resplitting" if moved else "RollingBack",
        message=f"{told}, for {grid.told}",
    )


def balanced(plan: Plan, spec: JobSpec, work: WorkEstimate) -> Ranges:
    """The layers of each stage, given who runs it: so that the longest stage of all pipelines is as short as may be.

    As the plan has them if the manifest says which they are, or if nobody's speed is known.
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
    """Is it the same grid, with a worker for each cell, all of whom stay?"""
    owners = [plan.at(cell).owner for cell in plan.cells()]
    there = set(owners) <= set(staying) and plan.holders() <= set(live)
    return there and grid == grid_of(plan) and len(plan.layouts) == 1 and len(set(owners)) == len(owners)


def _seats(peers: Sequence[Peer], cells: int) -> dict[WorkerId, Peer]:
    """The seats of `cells` cells, each by a name of its own: the workers, or, if there are fewer than cells, slots of
    them, neighbours together.
    """
    if len(peers) >= cells:
        return {peer.worker: peer for peer in peers}
    return {f"seat {i}": peers[i * len(peers) // cells] for i in range(cells)}


def _in_order(plan: Plan, peers: Sequence[Peer]) -> list[Peer]:
    """The workers in an order in which few layers have to move: those that run stages first, in the order of their
    stages.
    """
    place: dict[WorkerId, Cell] = {}
    for cell in plan.cells():
        place.setdefault(plan.at(cell).owner, cell)
    last = Cell(len(plan.pipelines), 0)
    return sorted(peers, key=lambda peer: place.get(peer.worker, last))


def in_places(plan: Plan, peers: Sequence[Peer], cells: int) -> list[Peer]:
    """The workers for that many cells: those that own one of them in its place, where they have its layers, and others
    in the gaps.
    """
    order = {cell: i for i, cell in enumerate(plan.cells()[:cells])}
    found: dict[int, Peer] = {}
    for peer in peers:
        place = next((order[cell] for cell in plan.owned_by(peer.worker) if cell in order), None)
        if place is not None:
            found[place] = peer
    others = [peer for peer in peers if peer not in found.values()]
    seated = [found.get(i) or (others.pop(0) if others else None) for i in range(cells)]
    return [*(peer for peer in seated if peer), *others]


def moved_plan(plan: Plan, live: Sequence[Peer], stopped: float | None) -> Plan:
    """Return the plan when all have begun with the layers that they need, and copies for others are not needed.

    stopped: seconds for which no step could begin, if that is known.
    """
    told = f"the job runs {grid_of(plan).told}"
    if not plan.moved:
        here, layers = sum(1 for holders in plan.sources if holders), len(plan.sources)
        told += f" with the checkpoint of step {plan.first_step}: {here} of {count(layers, 'layer')} from memory"
    told += "" if stopped is None else f", after {stopped:.2f} s in which layers moved"
    return _changed(
        plan,
        epoch=plan.epoch + 1,
        sources=(),
        workers=tuple(live),
        boundary=False,
        reason="Resplit" if plan.moved else "RolledBack",
        message=told,
    )


def _changed(plan: Plan, *, reason: str, message: str, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, reason=reason, message=message, **changes)
