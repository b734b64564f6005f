"""The plan: the workers of each cell, and the split of a step's microbatches. Frozen; only the coordinator makes plans.

Two parts change separately. The *assignment* (who owns and who replicates each cell) changes with the epoch, even in
the middle of a step. The *layout* (how many pipelines, which microbatches each runs) has its own generation and
changes only at the commit of a step, so no step changes its split midway.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec

from bamboo_core.checkpoint.layout import MOST_LAYERS, CheckpointId
from bamboo_core.job.spec import MOST_STAGES, MOST_WORKERS, JobSpec, PipelineSchedule, RedundancyMode
from bamboo_core.planning.gradient_groups import SumNode, are_bounds, group_bounds, nodes_of, share_of

WorkerId = str
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Short = Annotated[str, msgspec.Meta(max_length=256)]

MOST_EPOCHS = 10**9
MOST_GROUPS = 10**6
MOST_LAYOUTS = 2  # the current one and the next: the job is resized again only when one is left


class Cell(NamedTuple):
    """One stage of one pipeline: the unit that a worker owns."""

    pipeline: int
    stage: int


@lru_cache(maxsize=16)
def _grid(pipelines: int, stages: int) -> tuple[Cell, ...]:
    """Return the cells of a grid. Cached, because it is called often at every event, for few sizes of grids."""
    return tuple(Cell(d, s) for d in range(pipelines) for s in range(stages))


ROOT = Cell(0, 0)  # its owner decides when a step is committed


class Portion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some of a cell's groups of microbatches, and the worker that runs them."""

    worker: WorkerId
    # first, end: half-open, in units of the cell's groups divided by the last portion's end
    first: Annotated[int, msgspec.Meta(ge=0, le=MOST_GROUPS)]
    end: Annotated[int, msgspec.Meta(ge=1, le=MOST_GROUPS)]


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker that runs a cell and the workers that keep replicas of its state; the first replica is the shadow."""

    owner: WorkerId
    replicas: tuple[WorkerId, ...] = ()
    # which worker runs which of its microbatches (see `cell_portions`); empty: the owner runs them all
    portions: tuple[Portion, ...] = ()

    @property
    def shadow(self) -> WorkerId | None:
        return self.replicas[0] if self.replicas else None

    @property
    def holders(self) -> tuple[WorkerId, ...]:
        return (self.owner, *self.replicas)

    @property
    def runners(self) -> tuple[WorkerId, ...]:
        """The owner, then the worker of each portion; a worker may be listed several times."""
        return (self.owner, *(portion.worker for portion in self.portions))

    def is_run_as(self, other: "Assignment") -> bool:
        """Return whether this assignment and another one have the same owner and the same portions."""
        return (self.owner, self.portions) == (other.owner, other.portions)


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The global microbatch indices that each pipeline runs in a step, and the schedule."""

    generation: int
    split: tuple[tuple[int, ...], ...]
    # the first microbatch of each group whose gradients are summed separately (see `gradient_groups`), then the number
    # of microbatches
    bounds: tuple[int, ...]
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B

    @property
    def pipelines(self) -> int:
        return len(self.split)

    def cells(self, stages: int) -> tuple[Cell, ...]:
        """Return all cells of the layout's pipelines. stages: the number of stages in each."""
        return _grid(self.pipelines, stages)

    @cached_property
    def shares(self) -> tuple[SumNode, ...]:
        """The groups that each pipeline runs. Raises ValueError if these are not whole, consecutive groups."""
        return tuple(share_of(part, self.bounds) for part in self.split)

    def sums(self, pipeline: int) -> tuple[SumNode, ...]:
        """Return the groups of each sum that a pipeline sends to the others, in order."""
        return nodes_of(self.shares[pipeline], len(self.bounds) - 1)


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A live worker: its zone and node, and the address at which it listens for tensors from other workers."""

    worker: WorkerId
    host: Short
    port: Port
    zone: Short = ""
    node: Short = ""  # lost together with all its workers; "": unknown

    @property
    def failure_domain(self) -> str:
        """The node, which is lost with all its workers. A worker on an unknown node has a domain of its own."""
        return self.node or f"/{self.worker}"


class OwnerSpread(NamedTuple):
    """The spread of each stage's owners in all pipelines over places of one kind: workers, nodes or zones."""

    least: int  # the places of the stage with the fewest
    places: int  # the places of all workers


def owner_spread(rows: Sequence[Sequence[WorkerId]], peers: Mapping[WorkerId, Peer]) -> tuple[OwnerSpread, ...]:
    """Return how each stage's owners are spread over workers, failure domains and zones, in this order. rows: each
    pipeline's workers, by stage.
    """
    spreads = []
    for place_of in (attrgetter("worker"), attrgetter("failure_domain"), attrgetter("zone")):
        places = {worker: place_of(peer) for worker, peer in peers.items()}
        least = min(len({places[worker] for worker in owners}) for owners in zip(*rows, strict=True))
        spreads.append(OwnerSpread(least, len(set(places.values()))))
    return tuple(spreads)


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The plan of one epoch: the owner and replicas of each cell, and the layouts that may be in force."""

    epoch: int
    stages: tuple[tuple[int, int], ...]  # the half-open layer range of each stage
    pipelines: tuple[tuple[Assignment, ...], ...]  # [pipeline][stage]
    layouts: tuple[Layout, ...]  # that may be in force, oldest first; the last one is the target
    workers: tuple[Peer, ...]
    mode: RedundancyMode = RedundancyMode.REPLICAS
    # the epoch in which the workers' states began: from `restore`, or newly initialised. State of an earlier origin is
    # useless
    origin: int = 1
    restore: CheckpointId | None = None
    # `restore` is not a checkpoint of the store but a state that the workers held in memory during a re-split
    moved: bool = False
    # for each layer, the workers with a copy in memory of the state `restore`, until all have begun with it. A
    # checkpoint's layers without one are read from the store
    sources: tuple[tuple[WorkerId, ...], ...] = ()
    # the layers that each device runs, for all stages in order, if workers have several devices (`device_stages`)
    device_layers: tuple[tuple[int, int], ...] = ()
    boundary: bool = False  # takes effect at the step boundary that the root picks; else at once
    reason: str = ""
    message: str = ""

    def at(self, cell: Cell) -> Assignment:
        return self.pipelines[cell.pipeline][cell.stage]

    def cells(self) -> tuple[Cell, ...]:
        return _grid(len(self.pipelines), len(self.stages))

    def has(self, cell: Cell) -> bool:
        """Return whether the plan has that cell; its numbers may be any integers, as in another worker's message."""
        return 0 <= cell.pipeline < len(self.pipelines) and 0 <= cell.stage < len(self.stages)

    def owned_by(self, worker: WorkerId) -> list[Cell]:
        return list(self._by_owner.get(worker, ()))

    def replicated_by(self, worker: WorkerId) -> list[Cell]:
        return list(self._by_replica.get(worker, ()))

    def owners(self) -> frozenset[WorkerId]:
        """Return the workers that run a cell."""
        return self._owners

    @property
    def is_doubled(self) -> bool:
        """Whether a worker runs several cells of the target layout."""
        return len(self.target_owners) < self.target.pipelines * len(self.stages)

    @cached_property
    def target_owners(self) -> frozenset[WorkerId]:
        """The workers that run a cell of the target layout."""
        return frozenset(assignment.owner for row in self.pipelines[: self.target.pipelines] for assignment in row)

    def holders_of(self, stage: int) -> frozenset[WorkerId]:
        """Return the workers that hold a stage's state."""
        return self._holders_of[stage]

    def holders(self) -> frozenset[WorkerId]:
        """Return the workers that run a cell or keep a replica."""
        return self._holders

    def worker_ids(self) -> frozenset[WorkerId]:
        return self._worker_ids

    def peer(self, worker: WorkerId) -> Peer | None:
        return self._peers.get(worker)

    @cached_property
    def _by_owner(self) -> dict[WorkerId, list[Cell]]:
        """The cells of each owner. This and the other indexes are built on first use; a plan does not change."""
        index: dict[WorkerId, list[Cell]] = {}
        for cell in self.cells():
            index.setdefault(self.at(cell).owner, []).append(cell)
        return index

    @cached_property
    def _by_replica(self) -> dict[WorkerId, list[Cell]]:
        index: dict[WorkerId, list[Cell]] = {}
        for cell in self.cells():
            for worker in dict.fromkeys(self.at(cell).replicas):
                index.setdefault(worker, []).append(cell)
        return index

    @cached_property
    def _holders(self) -> frozenset[WorkerId]:
        return frozenset(w for row in self.pipelines for assignment in row for w in assignment.holders)

    @cached_property
    def _owners(self) -> frozenset[WorkerId]:
        return frozenset(assignment.owner for row in self.pipelines for assignment in row)

    @cached_property
    def _holders_of(self) -> tuple[frozenset[WorkerId], ...]:
        holders: list[set[WorkerId]] = [set() for _ in self.stages]
        for cell in self.cells():
            holders[cell.stage].update(self.at(cell).holders)
        return tuple(map(frozenset, holders))

    @cached_property
    def owner_spread(self) -> tuple[OwnerSpread, ...]:
        """The spread of each stage's owners in the target layout over workers, failure domains and zones."""
        rows = [[assignment.owner for assignment in row] for row in self.pipelines[: self.target.pipelines]]
        return owner_spread(rows, self._peers)

    @cached_property
    def _worker_ids(self) -> frozenset[WorkerId]:
        return frozenset(self._peers)

    @cached_property
    def _peers(self) -> dict[WorkerId, Peer]:
        """The workers by name; the first one if a name is repeated."""
        peers: dict[WorkerId, Peer] = {}
        for one in self.workers:
            peers.setdefault(one.worker, one)
        return peers

    @property
    def target(self) -> Layout:
        return self.layouts[-1]

    @property
    def first_step(self) -> int:
        """The number of committed steps in the state with which the workers began; 0 for the initial state."""
        return self.restore.step if self.restore else 0


def plan_problems(plan: Plan) -> list[str]:
    """Return the plan's violated invariants; empty if it is sound. Takes any plan, however malformed."""
    if not plan.stages or not plan.pipelines or not plan.layouts:
        return ["there are no stages, no pipelines or no layouts"]
    if any(len(row) != len(plan.stages) for row in plan.pipelines):
        return ["a pipeline does not have one cell for each stage"]
    return [
        *_holder_problems(plan),
        *_portion_problems(plan),
        *_layout_problems(plan),
        *_source_problems(plan),
        *_device_problems(plan),
    ]


def _device_problems(plan: Plan) -> list[str]:
    if not plan.device_layers:
        return []
    devices, rest = divmod(len(plan.device_layers), len(plan.stages))
    problems = []
    if any(assignment.portions for row in plan.pipelines for assignment in row):
        problems.append("workers have several devices, and portions")
    bounds = [0, *(end for _, end in plan.device_layers)]
    if plan.device_layers != tuple(pairwise(bounds)) or any(a >= b for a, b in pairwise(bounds)):
        problems.append("what devices run is not a partition of the layers")
    if rest or [end for _, end in plan.device_layers[devices - 1 :: max(1, devices)]] != [b for _, b in plan.stages]:
        problems.append("stages do not have the layers of as many devices each")
    return problems


def _holder_problems(plan: Plan) -> list[str]:
    problems = []
    known = plan.worker_ids()
    if len(known) != len(plan.workers):
        problems.append("a worker is listed twice")
    for cell in plan.cells():
        holders = plan.at(cell).holders
        if len(set(holders)) != len(holders):
            problems.append(f"{cell} is held twice by one worker")
        problems += [f"{cell} names {w}, which is not a live worker" for w in holders if w not in known]
    return problems


def _portion_problems(plan: Plan) -> list[str]:
    problems = []
    for cell in plan.cells():
        portions = plan.at(cell).portions
        owners = {plan.at(Cell(d, cell.stage)).owner for d in range(len(plan.pipelines))} if portions else set()
        bounds = [0, *(portion.end for portion in portions)]
        if any((p.first, p.end) != (a, b) or a >= b for p, (a, b) in zip(portions, pairwise(bounds), strict=True)):
            problems.append(f"the portions of {cell} are not a partition of it")
        problems += [
            f"{cell} is run by {p.worker}, which owns no cell of its stage" for p in portions if p.worker not in owners
        ]
    return problems


def _source_problems(plan: Plan) -> list[str]:
    if not plan.sources:
        return []
    problems = []
    if plan.restore is None or plan.epoch != plan.origin:
        problems.append("it names who holds a state's layers, and does not begin with that state")
    if len(plan.sources) != plan.stages[-1][1]:
        problems.append("it does not name who holds each layer")
    if plan.moved and not all(plan.sources):
        problems.append("a layer is held by nobody")
    if not plan.worker_ids().issuperset(w for holders in plan.sources for w in holders):
        problems.append("a layer is held by somebody who is not a live worker")
    return problems


def _layout_problems(plan: Plan) -> list[str]:
    problems = []
    if max(layout.pipelines for layout in plan.layouts) != len(plan.pipelines):
        problems.append("the layouts have more or fewer pipelines than are assigned")
    if any(not layout.split for layout in plan.layouts):
        problems.append("a layout has no pipelines")
    generations = [-1, *(layout.generation for layout in plan.layouts)]
    if any(newer <= older for older, newer in pairwise(generations)):
        problems.append("the layouts' generations do not rise")
    expected = 0
    for first, last in plan.stages:
        if first != expected or last <= first:
            problems.append("stages are not a partition of the layers")
        expected = last
    microbatches = [sorted(m for part in layout.split for m in part) for layout in plan.layouts]
    if any(m != list(range(len(microbatches[0]))) for m in microbatches):
        problems.append("a layout does not run every microbatch exactly once")
    else:
        problems += [problem for layout in plan.layouts for problem in _group_problems(layout)]
    if len({layout.bounds for layout in plan.layouts}) > 1:
        problems.append("the layouts do not sum gradients in the same groups")
    return problems


def _group_problems(layout: Layout) -> list[str]:
    if not are_bounds(layout.bounds, sum(map(len, layout.split))):
        return ["a layout's groups are not a partition of the microbatches"]
    try:
        _ = layout.shares
    except ValueError as error:
        return [f"a layout's groups: {error}"]
    return []


def plan_misfits(plan: Plan, spec: JobSpec) -> list[str]:
    """Return the reasons why a reported plan cannot be this job's; empty if it can. Takes any plan, however malformed.
    Does not check the bounds of `spec.elastic`: an edit may have changed them while the job is still adapting.
    """
    microbatches = spec.training.microbatches
    problems = []
    if not 1 <= plan.origin <= plan.epoch <= MOST_EPOCHS:
        problems.append("the epoch is out of range")
    if plan.first_step > spec.training.steps:
        problems.append("it begins after the last step")
    if not 1 <= len(plan.stages) <= MOST_STAGES:
        problems.append(f"{len(plan.stages)} stages instead of 1 to {MOST_STAGES}")
    elif spec.topology.split is not None and tuple(end - first for first, end in plan.stages) != spec.topology.split:
        problems.append("the stages do not have the layers that spec.topology.split says")
    elif plan.stages[-1][1] > MOST_LAYERS:
        problems.append("there are too many layers")
    if len(plan.device_layers) != (len(plan.stages) * spec.worker.devices if spec.worker.devices > 1 else 0):
        problems.append(f"it is not for workers with spec.worker.devices {spec.worker.devices}")
    if len(plan.pipelines) > microbatches:
        problems.append(f"{len(plan.pipelines)} pipelines for {microbatches} microbatches")
    if len(plan.workers) > MOST_WORKERS or len(plan.layouts) > MOST_LAYOUTS:
        problems.append("there are too many workers or layouts")
    elif any(sum(map(len, layout.split)) != microbatches for layout in plan.layouts):
        problems.append(f"a layout does not have {microbatches} microbatches")
    elif any(layout.bounds != group_bounds(microbatches, spec.training.groups) for layout in plan.layouts):
        problems.append(f"a layout does not sum gradients in {spec.training.groups} groups")
    elif any(layout.generation > MOST_EPOCHS for layout in plan.layouts):
        problems.append("a layout's generation is out of range")
    return problems or plan_problems(plan)
