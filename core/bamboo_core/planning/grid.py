"""The initial assignments: layers to stages, microbatches to pipelines, workers to cells; and the roles of workers."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, PipelineSchedule, RedundancySpec, TopologySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.gradient_groups import group_bounds, pipeline_bounds
from bamboo_core.planning.plan import Assignment, Layout, Peer, Plan, WorkerId, owner_spread
from bamboo_core.planning.ring import are_apart, replicas_in, rows, share_nodes
from bamboo_core.text import count


def split_layers(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Return contiguous layer ranges that minimise the cost of the costliest stage.

    Among these splits the last stage gets as many layers as possible; the same rules divide the remaining layers among
    the stages before it. Takes less than 20 ms for 10,000 layers on 64 stages, and a second on 1024 stages. costs: the
    cost of each layer, finite and not negative; at least one layer for each stage.
    """
    layers = len(costs)
    assert layers >= stages, (layers, stages)
    total = list(accumulate(costs, initial=0.0))
    bounds, worst = [layers], total[-1]
    for left in range(stages, 1, -1):
        end = bounds[-1]
        worst = _costliest(total, left, end, worst)
        start = bisect_left(total, -worst, 0, end, key=(-total[end]).__add__)
        bounds.append(max(start, left - 1))
    return tuple(pairwise(reversed([*bounds, 0])))


def layer_ranges(
    costs: Sequence[float], topology: TopologySpec, stages: int | None = None, devices: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return the layers of each stage: the manifest's split, else the one that minimises the costliest stage.

    stages: the number of stages; None: the topology's; ignored if the manifest has a split. devices: the number of each
    worker's devices; without a split the costliest device is minimised, and each stage has at least one layer per
    device. Raises ValueError naming the field if the model has too few layers, or not as many as the split.
    """
    if topology.split is None:
        count = stages or topology.stages
        if len(costs) < count * devices:
            raise ValueError(_too_many(len(costs), topology, count, devices))
        return grouped(split_layers(costs, count * devices), devices)
    bounds = list(accumulate(topology.split, initial=0))
    if bounds[-1] != len(costs):
        sizes = ", ".join(map(str, topology.split))
        raise ValueError(
            f"spec.topology.split: expected numbers that add up to the model's {len(costs)} layers, "
            f"got {bounds[-1]} ({sizes})"
        )
    return tuple(pairwise(bounds))


def _too_many(layers: int, topology: TopologySpec, stages: int, devices: int) -> str:
    """Return the message for a model with too few layers, naming the field that asks for too many stages or devices."""
    if topology.chooses_stages and stages == 1:
        return f"spec.worker.devices: expected at most the model's {layers} layers, got {devices}"
    path = "spec.elastic.minStages" if topology.chooses_stages else "spec.topology.stages"
    if devices == 1:
        return f"{path}: expected at most the model's {layers} layers, got {stages}"
    expected = f"expected with spec.worker.devices ({devices}) at most the model's {layers} layers"
    return f"{path}: {expected}, got {stages * devices} ({stages} times {devices})"


def grouped(ranges: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """Merge every `count` adjacent ranges of layers into one."""
    return tuple(pairwise([ranges[0][0], *(end for _, end in ranges[count - 1 :: count])]))


def _costliest(total: Sequence[float], stages: int, end: int, high: float) -> float:
    """Return the least possible cost of the costliest of `stages` stages, for the layers before `end`.

    Bisection in which both ends move to costs that a stage can have, so the result is exact. total: prefix sums of the
    layers' costs. high: a cost that is known to suffice.
    """
    low = total[end] / stages * (1 - 1e-12)
    while low < high:
        middle = (low + high) / 2
        limit = middle if low < middle < high else low
        fits, cost = _fill(total, stages, end, limit)
        low, high = (low, cost) if fits else (cost, high)
    return high


def _fill(total: Sequence[float], stages: int, end: int, limit: float) -> tuple[bool, float]:
    """Return whether `stages` stages of at most cost `limit` can hold the layers before `end`, and a cost.

    The cost is the costliest stage's if they can, else the smallest limit at which a stage would hold more.
    """
    start, worst, more = 0, 0.0, float("inf")
    for _ in range(stages):
        before = total[start]
        upto = bisect_right(total, limit, start + 1, end + 1, key=(-before).__add__) - 1
        worst = max(worst, total[upto] - before)
        if upto == end:
            return True, worst
        more = min(more, total[upto + 1] - before)
        start = upto
    return False, more


def make_layout(
    generation: int,
    microbatches: int,
    pipelines: int,
    groups: int,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> Layout:
    """Return a layout of consecutive shares of a step's microbatches, each of whole groups (`pipeline_shares`)."""
    bounds = pipeline_bounds(microbatches, groups, pipelines)
    return Layout(
        generation=generation,
        split=tuple(tuple(range(a, b)) for a, b in pairwise(bounds)),
        bounds=group_bounds(microbatches, groups),
        schedule=schedule,
    )


def assignments(
    row: Sequence[WorkerId], redundancy: RedundancySpec, peers: Mapping[WorkerId, Peer] = MappingProxyType({})
) -> tuple[Assignment, ...]:
    """Return the assignments of a pipeline's cells. row: the worker of each stage. peers: known workers, whose nodes
    and zones influence which workers keep replicas.
    """
    kept = replicas_in(row, redundancy.kept, peers)
    return tuple(Assignment(owner=worker, replicas=replicas) for worker, replicas in zip(row, kept, strict=True))


def initial_plan(
    peers: Sequence[Peer],
    stages: tuple[tuple[int, int], ...],
    pipelines: int,
    training: TrainingSpec,
    redundancy: RedundancySpec,
    *,
    epoch: int = 1,
    restore: CheckpointId | None = None,
    spread: SpreadPolicy = SpreadPolicy.INTERLEAVE,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> Plan:
    """Return the plan with which training starts, or continues from a checkpoint or a re-split's state. peers: at least
    one worker per cell; the rest are spare. stages: the layers of each stage. epoch: the plan's epoch and origin.
    restore: the state to start from; None: the initial state. spread: decides which workers are neighbours.
    """
    depth, known = len(stages), {p.worker: p for p in peers}
    arranged, redundancy = _arranged(peers, depth, pipelines, redundancy, spread)
    cells = tuple(assignments(row, redundancy, known) for row in arranged)
    layout = make_layout(0, training.microbatches, pipelines, training.groups, schedule)
    covered = _nodes_covered(cells, known) if redundancy.kept else ""
    covered += _zones_covered(cells, {w: p.zone for w, p in known.items()}) if redundancy.kept > 1 else ""
    begins = f"goes on from the checkpoint of step {restore.step}" if restore else "begins"
    return Plan(
        epoch=epoch,
        origin=epoch,
        restore=restore,
        stages=stages,
        pipelines=cells,
        layouts=(layout,),
        workers=tuple(peers),
        mode=redundancy.mode,
        reason="Started",
        message=f"training {begins}: {count(pipelines, 'pipeline')} of {count(depth, 'stage')},"
        f" {count(len(peers) - depth * pipelines, 'spare worker')}{covered}",
    )


def _arranged(
    peers: Sequence[Peer], depth: int, pipelines: int, redundancy: RedundancySpec, spread: SpreadPolicy
) -> tuple[list[list[WorkerId]], RedundancySpec]:
    """Return each pipeline's workers by stage, and the redundancy in force, whose mode is not Auto. Without replicas
    the owners of each stage, rather than neighbours, should be on different nodes and in different zones.
    """
    known, alone = {p.worker: p for p in peers}, redundancy.on(pipelines)
    chosen = rows(peers, depth, pipelines, alone.kept, spread)
    if alone.kept or pipelines == 1 or are_apart(owner_spread(chosen, known), alone.replicas):
        return chosen, alone
    if not spread.packs:
        columns = rows(peers, pipelines, depth, alone.replicas)
        turned = [list(row) for row in zip(*columns, strict=True)]
        if are_apart(owner_spread(turned, known), alone.replicas):
            return turned, alone
    kept = redundancy.on(pipelines, apart=False)
    return (rows(peers, depth, pipelines, kept.kept, spread) if kept.kept else chosen), kept


def _nodes_covered(rows: Sequence[Sequence[Assignment]], peers: Mapping[WorkerId, Peer]) -> str:
    """Return the message's part on whether the job can lose any one node; "" if no node has several workers."""
    if not share_nodes(tuple(peers.values())):
        return ""
    held = [{peers[w].failure_domain for a in cells for w in a.holders} for cells in zip(*rows, strict=True)]
    alone = sum(len(domains) < 2 for domains in held)
    return (
        f"; {count(alone, 'stage')} held on one node only" if alone else "; any node may be lost with all its workers"
    )


def _zones_covered(rows: Sequence[Sequence[Assignment]], zones: Mapping[WorkerId, str]) -> str:
    """Return the message's part on how many zones the job can lose at once; "" if all holders are in one zone. The
    number is one less than the fewest zones in which any stage has holders.
    """
    held = [{zones[w] for a in cells for w in a.holders} for cells in zip(*rows, strict=True)]
    known = len(set().union(*held))
    if known < 2:
        return ""
    lost = min(map(len, held)) - 1
    return f"; any {lost} of {known} zones may be lost at once" if lost else f"; none of {known} zones may be lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The stages that a worker runs, and the stages whose replicas it keeps, in a pipeline of a given length."""

    stage: int | None  # the worker's own stage; None: it is on standby
    # the stages that it runs, including those in `taken_over`; a stage is listed twice if run for two pipelines
    owned: tuple[int, ...]
    kept: tuple[int, ...]  # the stages whose replicas it keeps
    taken_over: tuple[int, ...] = ()

    @property
    def states(self) -> tuple[int, ...]:
        """The stages that the worker runs, each once: a worker holds one state per stage, even if it runs the stage for
        several pipelines.
        """
        return tuple(dict.fromkeys(self.owned))


def worker_roles(spec: JobSpec, stages: int, *, taken_over: bool) -> list[Roles]:
    """Return the roles that workers may have in normal operation or, with `taken_over`, after losses.

    After losses a worker also runs the next stages of its pipeline, as many as each stage has replicas. With several
    pipelines it may instead run its own stage for two pipelines.
    """
    replicas = min(spec.redundancy.kept, stages - 1)
    lost = replicas if taken_over else 0
    roles = []
    for stage in range(stages):
        ring = tuple((stage + ahead) % stages for ahead in range(stages))
        if taken_over and spec.topology.pipelines > 1:
            roles.append(Roles(stage=stage, owned=(stage, stage), kept=ring[1 : 1 + replicas], taken_over=(stage,)))
        if lost or not taken_over or spec.topology.pipelines == 1:
            kept = ring[1 + lost : 1 + lost + replicas]
            roles.append(Roles(stage=stage, owned=ring[: 1 + lost], kept=kept, taken_over=ring[1 : 1 + lost]))
    return roles
