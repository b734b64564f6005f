"""What a job's workers send each other in a step, within zones and between them, and what clouds bill for it. Pure.

Most clouds bill traffic between the zones of a region, and none within a zone. The bytes are those of the data plane's
frames (docs/design/data-plane.md) without their headers, counted from the sizes of a profile.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from itertools import repeat
from operator import add
from typing import Final, NamedTuple

from bamboo_core.planning.gradient_groups import nodes_of, share_of
from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId
from bamboo_core.planning.portions import keeper, ranges
from bamboo_core.planning.profile import ModelProfile

GB: Final = 1e9
# USD for a GB that crosses zones, billed to the one that sends it and again to the one that receives it: what EC2 takes
# "in each direction". See docs/simulator.md for other clouds.
ZONE_TRAFFIC_PRICE: Final = 0.01


class TrafficKind(StrEnum):
    """What the bytes are for. boundaries: activations and their gradients. reduction: of gradients over pipelines, and
    of the parts of a lost pipeline of one stage. replicas: final gradients (SYNC). states: whole stages, to new
    holders. checkpoints: to and from the store.
    """

    BOUNDARIES = "boundaries"
    REDUCTION = "reduction"
    REPLICAS = "replicas"
    STATES = "states"
    CHECKPOINTS = "checkpoints"


class Transfer(NamedTuple):
    """What one worker sends to another one; None: the store, which belongs to no zone."""

    kind: TrafficKind
    sender: WorkerId | None
    receiver: WorkerId | None
    size: float
    times: int = 1  # it sends as much to so many workers of the receiver's zone, each


@dataclass(frozen=True, slots=True)
class ZoneTraffic:
    """Bytes by their kind; kinds without any are left out."""

    within: Mapping[TrafficKind, float] = field(default_factory=dict)
    between: Mapping[TrafficKind, float] = field(default_factory=dict)

    @property
    def billed(self) -> float:
        """Bytes that cross zones."""
        return sum(self.between.values())

    def __add__(self, other: "ZoneTraffic") -> "ZoneTraffic":
        return ZoneTraffic(_sum(self.within, other.within), _sum(self.between, other.between))

    def __mul__(self, times: float) -> "ZoneTraffic":
        return ZoneTraffic(
            *({kind: size * times for kind, size in part.items()} for part in (self.within, self.between))
        )


def step_traffic(
    plan: Plan,
    layout: Layout,
    profile: ModelProfile,
    zones: Mapping[WorkerId, str] | None = None,
    checkpoint_steps: int | None = None,
) -> ZoneTraffic:
    """The traffic between zones of one undisturbed step under a plan. profile: for the job's microbatches
    (`for_microbatch`). zones: of workers, if others than the plan says. checkpoint_steps: steps from one checkpoint to
    the next, of which each has its share.

    Workers of which no zone is known count as being in one together. Not counted, since they are small or rare:
    headers, tied parameters, running buffers, evaluation, and what is sent again after a loss.
    """
    places = {peer.worker: peer.zone for peer in plan.workers} if zones is None else zones
    transfers = list(step_transfers(plan, layout, profile, places))
    if checkpoint_steps is not None:
        share = profile.state_bytes / checkpoint_steps
        transfers.append(Transfer(TrafficKind.CHECKPOINTS, plan.at(Cell(0, 0)).owner, None, share))
    return by_zone(transfers, places)


def step_transfers(
    plan: Plan,
    layout: Layout,
    profile: ModelProfile,
    zones: Mapping[WorkerId, str] | None = None,
) -> Iterator[Transfer]:
    """Yield the transfers of one undisturbed step, between different workers. zones: of workers, if what a reduction
    sends to those of one zone may be said at once: its pairs grow with the square of the pipelines.
    """
    receivers = [_receivers(plan, layout, stage, zones) for stage in range(len(plan.stages))]
    parts = [profile.layers[first:end] for first, end in plan.stages]
    boundaries = [layers[-1].boundary for layers in parts]
    gradients = [sum(layer.gradients for layer in layers) for layers in parts]
    trained = [any(gradients[: s + 1]) for s in range(len(parts))]  # else no gradient comes back to it
    found = (
        transfer
        for cell in plan.cells()
        if cell.pipeline < layout.pipelines
        for transfer in (
            *_boundaries(
                plan, cell, len(layout.split[cell.pipeline]) * boundaries[cell.stage], trained=trained[cell.stage]
            ),
            *_reduction(plan, layout, cell, gradients[cell.stage], receivers[cell.stage]),
            *_replicas(plan, cell, profile),
            *_finished_groups(plan, layout, cell, gradients[cell.stage]),
        )
    )
    return (transfer for transfer in found if transfer.sender != transfer.receiver)


def by_zone(transfers: Iterable[Transfer], zones: Mapping[WorkerId, str]) -> ZoneTraffic:
    """What crosses zones, and what does not, as what goes to the store and comes from it: no cloud bills that within
    a region.
    """
    within, between = defaultdict[TrafficKind, float](float), defaultdict[TrafficKind, float](float)
    for kind, sender, receiver, size, times in transfers:
        crosses = sender is not None and receiver is not None and zones.get(sender, "") != zones.get(receiver, "")
        part = between if crosses else within
        part[kind] = part[kind] + size if times == 1 else reduce(add, repeat(size, times), part[kind])
    return ZoneTraffic(dict(within), dict(between))


def _sum(one: Mapping[TrafficKind, float], other: Mapping[TrafficKind, float]) -> dict[TrafficKind, float]:
    return {kind: one.get(kind, 0.0) + other.get(kind, 0.0) for kind in {**one, **other}}


def _boundaries(plan: Plan, cell: Cell, size: float, *, trained: bool) -> Iterator[Transfer]:
    """The transfers between a cell and the one after it: outputs there, their gradients back. size: of a step's
    outputs. trained: whether the cell, or a stage before it, has parameters that are trained.
    """
    if cell.stage == len(plan.stages) - 1:
        return
    here, there = plan.at(cell), plan.at(Cell(cell.pipeline, cell.stage + 1)).owner
    yield Transfer(TrafficKind.BOUNDARIES, here.owner, there, size)
    if not trained:
        return
    yield Transfer(TrafficKind.BOUNDARIES, there, here.owner, size)


def _replicas(plan: Plan, cell: Cell, profile: ModelProfile) -> Iterator[Transfer]:
    """The final gradients of the stage that they hold."""
    size = sum(layer.gradients for layer in profile.layers[slice(*plan.stages[cell.stage])])
    for replica in plan.at(cell).replicas:
        yield Transfer(TrafficKind.REPLICAS, plan.at(cell).owner, replica, size)


def _finished_groups(plan: Plan, layout: Layout, cell: Cell, gradients: float) -> Iterator[Transfer]:
    """The sums of groups, but for the last one, as often as they are finished; a slow link gets fewer of them."""
    share, receiver = layout.shares[cell.pipeline], keeper(plan, cell)
    if receiver is not None and share.end - share.first > 1:
        yield Transfer(TrafficKind.REDUCTION, plan.at(cell).owner, receiver, gradients, share.end - share.first - 1)


def _receivers(plan: Plan, layout: Layout, stage: int, zones: Mapping[WorkerId, str] | None) -> list[Counter[WorkerId]]:
    """Who runs a stage and of how many pipelines: each by itself, or those of each zone together."""
    found = defaultdict[str, Counter[WorkerId]](Counter)
    for pipeline in range(layout.pipelines):
        owner = plan.at(Cell(pipeline, stage)).owner
        found[owner if zones is None else zones.get(owner, "")][owner] += 1
    return list(found.values())


def _reduction(
    plan: Plan,
    layout: Layout,
    cell: Cell,
    gradients: float,
    receivers: Sequence[Counter[WorkerId]],
) -> Iterator[Transfer]:
    """What a pipeline sends to each other one: its sums of their chunk, and the total of its own chunk."""
    owner, bounds = plan.at(cell).owner, layout.bounds
    sums = len(nodes_of(layout.shares[cell.pipeline], len(bounds) - 1))
    for them in receivers:
        receiver = next((worker for worker in them if worker != owner), None)
        if receiver is not None:
            size, times = gradients / layout.pipelines * (sums + 1), them.total() - them[owner]
            yield Transfer(TrafficKind.REDUCTION, owner, receiver, size, times)
    for worker, (first, end) in ranges(layout, cell.pipeline, plan.at(cell).portions) if plan.at(cell).portions else ():
        parts = nodes_of(share_of(range(first, end), bounds), len(bounds) - 1)
        yield Transfer(TrafficKind.REDUCTION, worker, owner, gradients * len(parts))


def traffic_usd(billed: float, price: float = ZONE_TRAFFIC_PRICE) -> float:
    """The USD for so many bytes that cross zones. price: USD for each GB, and for each of both ways."""
    return billed / GB * 2 * price
