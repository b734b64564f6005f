"""The assignments at the start: layers to stages, microbatches to pipelines, workers to cells."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, PipelineSchedule, RedundancySpec, TopologySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.gradient_groups import group_bounds, pipeline_bounds
from bamboo_core.planning.plan import Assignment, CheckpointId, Layout, Peer, Plan, WorkerId, owner_spread
from bamboo_core.planning.ring import are_apart, replicas_in, rows, share_nodes
from bamboo_core.text import count


def split_layers(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Contiguous layer ranges that minimise the costliest stage; costs are finite and not negative.

    Of the splits that do so the last stage gets as many layers as may be, then the one before it as many as may be
    without making the rest costlier than it has to be, and so on. 10,000 layers take less than 20 ms on 64 stages, and
    a second on 1024. Raises ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise ValueError(f"spec.topology.stages: expected at most the model's {layers} layers, got {stages}")
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
    """The layers of each stage: as the manifest says, else so that the costliest stage costs least.

    stages: if there are fewer than the manifest has; then it splits none. devices: of each worker; a stage has at least
    as many layers, and costs as much as what the busiest one runs. Raises ValueError, which names the field, if there
    are fewer layers than stages, or than devices, or not those that it splits.
    """
    if topology.split is None:
        count = stages or topology.stages
        if len(costs) < count * devices:
            raise ValueError(_too_many(len(costs), topology, count, devices))
        return grouped(split_layers(costs, count * devices), devices)
    if min(topology.split) < devices:
        raise ValueError(
            f"spec.topology.split: expected at least {devices} layers for each stage, one for each device "
            f"(spec.worker.devices), got {min(topology.split)}"
        )
    bounds = list(accumulate(topology.split, initial=0))
    if bounds[-1] != len(costs):
        told = ", ".join(map(str, topology.split))
        raise ValueError(
            f"spec.topology.split: expected numbers that add up to the model's {len(costs)} layers, "
            f"got {bounds[-1]} ({told})"
        )
    return tuple(pairwise(bounds))


def _too_many(layers: int, topology: TopologySpec, stages: int, devices: int) -> str:
    """Names the field that asks for more than the model's layers."""
    if topology.chooses_stages and stages == 1:
        return f"spec.worker.devices: expected at most the model's {layers} layers, got {devices}"
    path = "spec.elastic.minStages" if topology.chooses_stages else "spec.topology.stages"
    if devices == 1:
        return f"{path}: expected at most the model's {layers} layers, got {stages}"
    said = f"expected with spec.worker.devices ({devices}) at most the model's {layers} layers"
    return f"{path}: {said}, got {stages * devices} ({stages} times {devices})"


def grouped(ranges: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """Adjacent ranges of layers, so many together."""
    return tuple(pairwise([ranges[0][0], *(end for _, end in ranges[count - 1 :: count])]))


def _costliest(total: Sequence[float], stages: int, end: int, high: float) -> float:
    """What the costliest of that many stages costs at least, for the layers before `end`. high: it need not cost more.

    Bisection, in which both ends jump to costs that a stage can have, so that it ends with exactly one of them.
    """
    low = total[end] / stages * (1 - 1e-12)
    while low < high:
        middle = (low + high) / 2
        limit = middle if low < middle < high else low
        fits, cost = _fill(total, stages, end, limit)
        low, high = (low, cost) if fits else (cost, high)
    return high


def _fill(total: Sequence[float], stages: int, end: int, limit: float) -> tuple[bool, float]:
    """Do that many stages of no more than that cost each suffice?

    With the costliest one's cost if they do, else with the least limit with which a stage would hold more.
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
    groups: int | None,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> Layout:
    """Consecutive, nearly equal shares of a step's microbatches; whole groups of them, if gradients are summed so."""
    bounds = pipeline_bounds(microbatches, groups or microbatches, pipelines)
    return Layout(
        generation=generation,
        split=tuple(tuple(range(a, b)) for a, b in pairwise(bounds)),
        groups=group_bounds(microbatches, groups) if groups else (),
        schedule=schedule,
    )


def assignments(
    row: Sequence[WorkerId], redundancy: RedundancySpec, peers: Mapping[WorkerId, Peer] = MappingProxyType({})
) -> tuple[Assignment, ...]:
    """The assignments of a pipeline with these workers, each of which runs a stage. peers: where they are, as far as it
    is known.
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
    """The first plan from a state on: needs stages x pipelines workers; those that are left stand by.

    epoch: its own. restore: the state; None: that before the first step. spread: which workers are neighbours.
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
    """Each pipeline's workers, and how their stages are protected. Without replicas it is not neighbours that are to be
    on different nodes and in different zones but the owners of each stage.
    """
    known, alone = {p.worker: p for p in peers}, redundancy.on(pipelines)
    found = rows(peers, depth, pipelines, alone.kept, spread)
    if alone.kept or pipelines == 1 or are_apart(owner_spread(found, known), alone.replicas):
        return found, alone
    if not spread.packs:
        columns = rows(peers, pipelines, depth, alone.replicas)
        turned = [list(row) for row in zip(*columns, strict=True)]
        if are_apart(owner_spread(turned, known), alone.replicas):
            return turned, alone
    kept = redundancy.on(pipelines, apart=False)
    return (rows(peers, depth, pipelines, kept.kept, spread) if kept.kept else found), kept


def _nodes_covered(rows: Sequence[Sequence[Assignment]], peers: Mapping[WorkerId, Peer]) -> str:
    """A sentence on nodes that workers share: whether any of these may be lost."""
    if not share_nodes(tuple(peers.values())):
        return ""
    held = [{peers[w].failure_domain for a in cells for w in a.holders} for cells in zip(*rows, strict=True)]
    alone = sum(len(domains) < 2 for domains in held)
    return (
        f"; {count(alone, 'stage')} held on one node only" if alone else "; any node may be lost with all its workers"
    )


def _zones_covered(rows: Sequence[Sequence[Assignment]], zones: Mapping[WorkerId, str]) -> str:
    """How many zones may be lost at once, for a person: every stage is held in one more."""
    held = [{zones[w] for a in cells for w in a.holders} for cells in zip(*rows, strict=True)]
    known = len(set().union(*held))
    if known < 2:
        return ""
    lost = min(map(len, held)) - 1
    return f"; any {lost} of {known} zones may be lost at once" if lost else f"; none of {known} zones may be lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What a worker holds of a pipeline of some number of stages."""

    stage: int | None  # its own; None: it is on standby
    # the stages that it runs; of these taken_over from others, and one twice if it runs it for two pipelines
    owned: tuple[int, ...]
    kept: tuple[int, ...]  # those whose replicas it keeps
    taken_over: tuple[int, ...] = ()

    @property
    def states(self) -> tuple[int, ...]:
        """The stages that it runs, each once: their state is here once, whoever's microbatches are run."""
        return tuple(dict.fromkeys(self.owned))


def worker_roles(spec: JobSpec, stages: int, *, taken_over: bool) -> list[Roles]:
    """Return the roles that workers may have: in calm, or while a worker runs as many lost stages as there are replicas
    of each. What another pipeline has lost, owners of the same stage run, too: beside the heir, or without replicas.
    """
    replicas = min(spec.redundancy.kept, stages - 1)
    lost = replicas if taken_over else 0
    found = []
    for stage in range(stages):
        ring = tuple((stage + ahead) % stages for ahead in range(stages))
        if taken_over and spec.topology.pipelines > 1:
            found.append(Roles(stage=stage, owned=(stage, stage), kept=ring[1 : 1 + replicas], taken_over=(stage,)))
        if lost or not taken_over or spec.topology.pipelines == 1:
            kept = ring[1 + lost : 1 + lost + replicas]
            found.append(Roles(stage=stage, owned=ring[: 1 + lost], kept=kept, taken_over=ring[1 : 1 + lost]))
    return found
