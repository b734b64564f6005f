"""The traffic of a job's workers between zones, and its price. Pure.

Most clouds bill traffic between the zones of a region, but not within a zone. This module counts the bytes of the data
plane's frames (docs/design/data-plane.md) without headers, computed from a profile's sizes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from bamboo_core.planning.cell_portions import keeper, ranges
from bamboo_core.planning.gradient_groups import nodes_of, share_of
from bamboo_core.planning.plan import Cell, Layout, Plan, WorkerId
from bamboo_core.planning.profile import ModelProfile

GB: Final = 1e9
# USD per GB that crosses zones, billed to the sender and again to the receiver: EC2's price "in each direction". See
# docs/simulator.md for other clouds.
ZONE_TRAFFIC_PRICE: Final = 0.01


class TrafficKind(StrEnum):
    """The kinds of traffic between workers.

    boundaries: activations and their gradients. reduction: sums of gradients for other pipelines, for the owner of a
    cell with portions, or for a worker that keeps copies. replicas: final gradients. states: states of stages.
    """

    BOUNDARIES = "boundaries"
    REDUCTION = "reduction"
    REPLICAS = "replicas"
    STATES = "states"


class Transfer(NamedTuple):
    """Data that one worker sends to another `times` times. size: bytes each time."""

    kind: TrafficKind
    sender: WorkerId
    receiver: WorkerId
    size: float
    times: int = 1  # how often: for each pipeline of the receiver or of its zone, or for each group of gradients


def step_traffic(plan: Plan, layout: Layout, profile: ModelProfile) -> float:
    """Return the bytes of one undisturbed step that cross zones. profile: scaled to the job's microbatches.

    Workers of unknown zone count as being in one common zone. Small or rare traffic is ignored: headers, tied
    parameters, running buffers, evaluation, and repetitions after a loss. Traffic with the store is ignored, too,
    since the store has no zone.
    """
    zones = {peer.worker: peer.zone for peer in plan.workers}
    return crossing(step_transfers(plan, layout, profile, zones), zones)


def step_transfers(
    plan: Plan,
    layout: Layout,
    profile: ModelProfile,
    zones: Mapping[WorkerId, str] | None = None,
) -> Iterator[Transfer]:
    """Yield the transfers of one undisturbed step, between different workers.

    zones: the zone of each worker. If given, an owner's reduction transfers to the same zone are combined, since their
    number grows with the square of the number of pipelines.
    """
    receivers = [_receivers(plan, layout, stage, zones) for stage in range(len(plan.stages))]
    parts = [profile.layers[first:end] for first, end in plan.stages]
    boundaries = [layers[-1].boundary for layers in parts]
    gradients = [sum(layer.gradients for layer in layers) for layers in parts]
    trained = [any(gradients[: s + 1]) for s in range(len(parts))]  # else the stage gets no gradient back
    transfers = (
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
    return (transfer for transfer in transfers if transfer.sender != transfer.receiver)


def crossing(transfers: Iterable[Transfer], zones: Mapping[WorkerId, str]) -> float:
    """Return the bytes of the transfers between different zones. zones: the zone of each worker."""
    return sum(one.size * one.times for one in transfers if zones.get(one.sender, "") != zones.get(one.receiver, ""))


def _boundaries(plan: Plan, cell: Cell, size: float, *, trained: bool) -> Iterator[Transfer]:
    """Yield the transfers between a cell and its pipeline's next cell, if any: outputs, and their gradients back.

    size: bytes of a step's outputs. trained: whether the cell's stage or an earlier one has trained parameters.
    """
    if cell.stage == len(plan.stages) - 1:
        return
    here, there = plan.at(cell), plan.at(Cell(cell.pipeline, cell.stage + 1)).owner
    yield Transfer(TrafficKind.BOUNDARIES, here.owner, there, size)
    if not trained:
        return
    yield Transfer(TrafficKind.BOUNDARIES, there, here.owner, size)


def _replicas(plan: Plan, cell: Cell, profile: ModelProfile) -> Iterator[Transfer]:
    """Yield the transfers of final gradients from the cell's owner to its replicas."""
    size = sum(layer.gradients for layer in profile.layers[slice(*plan.stages[cell.stage])])
    for replica in plan.at(cell).replicas:
        yield Transfer(TrafficKind.REPLICAS, plan.at(cell).owner, replica, size)


def _finished_groups(plan: Plan, layout: Layout, cell: Cell, gradients: float) -> Iterator[Transfer]:
    """Yield the transfers of finished group sums, except the last, to the worker that keeps copies, if there is one."""
    share, receiver = layout.shares[cell.pipeline], keeper(plan, cell)
    if receiver is not None and share.end - share.first > 1:
        yield Transfer(TrafficKind.REDUCTION, plan.at(cell).owner, receiver, gradients, share.end - share.first - 1)


def _receivers(plan: Plan, layout: Layout, stage: int, zones: Mapping[WorkerId, str] | None) -> list[Counter[WorkerId]]:
    """Count the pipelines in which each worker owns the stage. Return one counter per owner, or per zone if given."""
    owners = defaultdict[str, Counter[WorkerId]](Counter)
    for pipeline in range(layout.pipelines):
        owner = plan.at(Cell(pipeline, stage)).owner
        owners[owner if zones is None else zones.get(owner, "")][owner] += 1
    return list(owners.values())


def _reduction(
    plan: Plan,
    layout: Layout,
    cell: Cell,
    gradients: float,
    receivers: Sequence[Counter[WorkerId]],
) -> Iterator[Transfer]:
    """Yield a cell owner's transfers to other pipelines: sums for their gradient chunks, and its own chunk's total.

    Then yield the sums that workers with portions of the cell send to the owner. receivers: from `_receivers`.
    """
    owner, bounds, sums = plan.at(cell).owner, layout.bounds, len(layout.sums(cell.pipeline))
    for them in receivers:
        receiver = next((worker for worker in them if worker != owner), None)
        if receiver is not None:
            size, times = gradients / layout.pipelines * (sums + 1), them.total() - them[owner]
            yield Transfer(TrafficKind.REDUCTION, owner, receiver, size, times)
    for worker, (first, end) in ranges(layout, cell.pipeline, plan.at(cell).portions) if plan.at(cell).portions else ():
        parts = nodes_of(share_of(range(first, end), bounds), len(bounds) - 1)
        yield Transfer(TrafficKind.REDUCTION, worker, owner, gradients * len(parts))


def traffic_usd(billed: float, price: float = ZONE_TRAFFIC_PRICE) -> float:
    """Return the USD for `billed` bytes that cross zones. price: USD per GB, billed to sender and receiver."""
    return billed / GB * 2 * price
