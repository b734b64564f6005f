"""Pure data parallelism with the optimizer's state in shards: who holds which layers' state. Pure.

With one stage a pipeline's worker has the whole model's parameters, but needs the optimizer's state of a part of the
layers only, if somebody else updates the others and sends it the new parameters (Rajbhandari et al., ZeRO, 2020: its
first stage). A shard is a range of layers. There is one for each pipeline: its cell's owner holds it and runs its
updates, and the cell's replicas, workers of other pipelines, hold it as well, so that no shard is lost with a worker.
"""

from collections.abc import Container, Mapping, Sequence

import msgspec

from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.grid import split_layers
from bamboo_core.planning.plan import Cell, Peer, Plan, WorkerId
from bamboo_core.planning.ring import replicas_in

Ranges = tuple[tuple[int, int], ...]

LEAST_PIPELINES = 3  # with two, a shard's two holders are all there are


def shard_layers(sizes: Sequence[float], pipelines: int) -> Ranges:
    """The layers of each shard, so that the largest is as small as whole layers allow. Empty: everybody holds all.

    sizes: of each layer's optimizer state, in any unit.
    """
    if pipelines < LEAST_PIPELINES or len(sizes) < pipelines:
        return ()
    return split_layers(sizes, pipelines)


def sharded(plan: Plan, spec: JobSpec, sizes: Sequence[float] | None) -> Plan:
    """A first plan, with shards and who holds them if the job asks for that. sizes: None if they are not known."""
    if not spec.topology.shard_optimizer or len(plan.stages) > 1:
        return plan
    layers = plan.stages[-1][1]
    known = sizes if sizes is not None and len(sizes) == layers else (1.0,) * layers
    shards = shard_layers(known, len(plan.pipelines))
    if not shards:
        return plan
    peers = {peer.worker: peer for peer in plan.workers}
    owners = [plan.at(cell).owner for cell in plan.cells()]
    held = shard_replicas(owners, spec.redundancy.kept, peers)
    rows = tuple((msgspec.structs.replace(plan.at(Cell(d, 0)), replicas=replicas),) for d, replicas in enumerate(held))
    return msgspec.structs.replace(plan, pipelines=rows, shards=shards)


def shard_replicas(
    owners: Sequence[WorkerId], count: int, peers: Mapping[WorkerId, Peer], leaving: Container[WorkerId] = ()
) -> tuple[tuple[WorkerId, ...], ...]:
    """The workers of other pipelines that hold each shard beside its owner: those of the pipelines before, in a ring.

    So each worker holds as many, as a stage's worker does in a pipeline (`ring`).
    """
    return replicas_in(owners, count, peers, leaving)
