"""A BambooJob's spec as frozen values: the types of the API, from which the CRD and docs/api.md are generated.

`bamboo_core.job.manifest` reads these values and checks every rule. A field's annotation gives its form, and the text
below it is its description (see `bamboo_core.job.model`). An absent part has its default, often None. Lists are tuples;
durations are seconds; field names are the manifest's in snake_case.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final

from bamboo_core.checkpoint.layout import MOST_LAYERS
from bamboo_core.job.forms import Integer, Items, TextOf, Tree
from bamboo_core.job.model import ListOf, Mark, Values, completes
from bamboo_core.job.placement_spec import (
    NodePool,
    SpreadPolicy,
    SpreadSpec,
    WorkerSpec,
)
from bamboo_core.job.text_patterns import (
    DATE_TIME,
    DNS_NAME,
    ENTRYPOINT,
    MONEY,
    STORAGE,
    TENSORS,
    WEIGHTS,
)
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.names import STORAGE_FOLDER
from bamboo_core.storage.url import shown_url

MOST_REPLICAS = 3  # of a stage's state
MOST_WORKERS, MOST_STAGES, MOST_PIPELINES, MOST_STANDBYS = 10_000, 1024, 1024, 1024
USUAL_STABILIZATION = 120  # seconds


class RedundancyMode(StrEnum):
    AUTO = "Auto"  # as `RedundancySpec.on` decides; no plan has it
    NONE = "None"
    REPLICAS = "Replicas"


class ReplicaPlacement(StrEnum):
    """The memory that holds replicas."""

    DEVICE = "Device"
    HOST = "Host"


_PATTERNS: Final = Items(
    form=TextOf(TENSORS), of="names of tensors", each='A name, in which "*" stands for any characters.', most=100
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSpec:
    """The source of the model's initial weights, instead of random ones."""

    url: Annotated[str, TextOf(WEIGHTS, shown=shown_url)]
    """A trained job's folder of weights, a folder with model.safetensors or its index, a file NAME.safetensors, or a
    folder of checkpoints.
    """
    step: Annotated[int | None, Integer(0)] = None
    """The step of the checkpoint to take. Required if url is a folder of checkpoints."""
    drop: Annotated[tuple[str, ...], _PATTERNS] = ()
    """Names of the file's tensors to leave out, and of the model's tensors that begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """The model and its data: the Task that `build(config)`, the function at the entrypoint, returns."""

    entrypoint: Annotated[str, ENTRYPOINT]
    """A Python function as module:function, which is called with the config and returns a Task."""
    config: Annotated[Mapping[str, Any], Tree()] = field(default_factory=dict)
    """The function's argument: any JSON object with at most 10000 values in 16 levels, strings of at most 65536
    characters and names of at most 253.
    """
    initial_from: InitialSpec | None = None
    """The initial weights. A job that continues from its own checkpoint ignores them."""


class PipelineSchedule(StrEnum):
    """The order in which a stage's forwards and backwards run; see docs/design/engine.md."""

    ONE_F_ONE_B = "1F1B"
    ZB_H1 = "ZBH1"  # weight gradients later than input gradients, for which the stage before waits


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpec:
    """The fixed parts of the grid; with `elastic` the coordinator chooses the rest.

    stages, pipelines: 1 if the coordinator chooses the number (chooses_stages, chooses_pipelines). split: None to
    balance stages by the layers' costs. schedule: see docs/design/engine.md; None for 1F1B, or for the coordinator's
    choice from `schedules`.
    """

    stages: Annotated[int, Integer(1, MOST_STAGES), Mark.FOLLOWS, Mark.FIXED]
    """The number of stages into which the layers are split; a pipeline has one worker for each. Required if
    neither elastic nor split is given.
    """
    pipelines: Annotated[int, Integer(1, MOST_PIPELINES), Mark.FOLLOWS, Mark.WHILE_SUSPENDED] = 1
    """The number of pipelines, which share the batch. Without elastic 1 by default."""
    schedule: PipelineSchedule | None = None
    """The order of forwards and backwards; all orders give the same bits. ZBH1 computes weight gradients later, which
    leaves about a third of the bubbles; every stage then keeps as many activations as the first one. By default 1F1B,
    or with elastic the coordinator's choice. A change takes effect with the next step.
    """
    split: Annotated[
        tuple[int, ...] | None,
        Items(
            form=Integer(1, MOST_LAYERS),
            of="layers of each stage",
            each="Layers of a stage.",
            least=1,
            most=MOST_STAGES,
        ),
        Mark.FIXED,
    ] = None
    """The layers of each stage, such as [3, 4, 4, 2]. By default stages are balanced by cost."""
    chooses_stages: Annotated[bool, Mark.NOT_IN_SPEC] = False
    chooses_pipelines: Annotated[bool, Mark.NOT_IN_SPEC] = False

    @property
    def first_schedule(self) -> PipelineSchedule:
        """The schedule in force until the coordinator chooses another one."""
        return self.schedule or PipelineSchedule.ONE_F_ONE_B


class Objective(StrEnum):
    """The goal by which the coordinator chooses a grid. Throughput: the most samples per second. Value: the most
    samples for the workers' price among grids of about that speed; workers that add less than they cost are released.
    """

    THROUGHPUT = "Throughput"
    VALUE = "Value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """The bounds within which the coordinator chooses the parts of the grid that `topology` does not fix."""

    max_workers: Annotated[int, Integer(1, MOST_WORKERS), Mark.FREE]
    """The most workers that run stages. The job requests as many of them as a grid can use."""
    min_workers: Annotated[int, Integer(1, MOST_WORKERS), Mark.FREE] = 1
    """The fewest workers with which the job begins or changes its grid. With fewer, workers run several stages."""
    min_stages: Annotated[int, Integer(1, MOST_STAGES), Mark.FREE] = 1
    """The fewest stages to choose, if you know better than the estimate of memory what fits your GPUs."""
    objective: Annotated[Objective, Mark.FREE] = Objective.THROUGHPUT
    """Throughput: the coordinator picks the grid that is expected to train the most samples a second on the available
    nodes. Value: the job also holds only as many workers as train the most samples for their price (nodePools), at 0.95
    times the speed of maxWorkers or more.
    """
    stabilization_seconds: Annotated[int, Integer(0), Mark.FREE] = USUAL_STABILIZATION
    """The most seconds for which nodes must be available before the grid grows onto them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancySpec:
    """The protection of the job against lost workers."""

    mode: Annotated[RedundancyMode, Mark.FREE] = RedundancyMode.AUTO
    """Replicas: other workers keep each stage's state in step. None: only other pipelines do. Auto: None with four
    pipelines or more on different nodes and zones, otherwise Replicas if they fit. A change takes effect with the next
    step.
    """
    replicas: Annotated[int, Integer(1, MOST_REPLICAS), Mark.FREE] = 1
    """The number of other workers that keep each stage's state in step: the workers of the stages before it, then spare
    ones. That many workers may be lost at once without a lost step, or that many zones if the workers are in at least
    one zone more. Without effect if mode is None.
    """
    placement: ReplicaPlacement = ReplicaPlacement.DEVICE
    """Where replicas are kept. Host moves their optimizer state to host memory. Can change only while the job is
    suspended.
    """

    @property
    def kept(self) -> int:  # requested replicas of each stage's state; in Auto other pipelines' owners count, too
        return 0 if self.mode is RedundancyMode.NONE else self.replicas

    def on(self, pipelines: int, *, apart: bool = True) -> "RedundancySpec":
        """Return the redundancy in force, whose mode is never Auto, on a grid with `pipelines` pipelines.

        Auto becomes None if more than MOST_REPLICAS pipelines, which hold each other's states, are `apart`; otherwise
        it becomes Replicas. apart: each stage's owners are on enough nodes and in enough zones (`ring.are_apart`).
        """
        if self.mode is not RedundancyMode.AUTO:
            return self
        alone = pipelines > MOST_REPLICAS and apart
        return replace(self, mode=RedundancyMode.NONE if alone else RedundancyMode.REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbySpec:
    """The standby workers: spare workers that the job requests."""

    workers: Annotated[int, Integer(0, MOST_STANDBYS)] = 0
    """The number of standby workers."""


CLAIM: Final = "pvc://"  # before the name of a PersistentVolumeClaim
USUAL_STEPS: Final = 200  # between checkpoints, unless fewer pay or writing is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """The place and interval of checkpoints. every_steps: None if the coordinator chooses the interval, which is
    USUAL_STEPS until step times are known.
    """

    storage: Annotated[str, TextOf(STORAGE, shown=shown_url)]
    """A URL such as s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder, which no other job
    uses; credentials come from the pod's environment or service account. Or pvc://NAME, a PersistentVolumeClaim that
    every worker mounts; its access mode has to allow several pods.
    """
    every_steps: Annotated[int | None, Integer()] = None
    """Steps between checkpoints; by default 200, or fewer where that pays. The last step also has one."""
    keep_latest: Annotated[int, Integer(1, 10_000)] = 3
    """The number of checkpoints to keep."""
    keep_best: bool = False
    """Keep a checkpoint of the best evaluated state (training.evaluation.metric)."""

    @property
    def claim(self) -> str | None:
        """The name of the PersistentVolumeClaim; None if storage is a URL."""
        return self.storage.removeprefix(CLAIM) if self.storage.startswith(CLAIM) else None

    @property
    def url(self) -> str | None:
        """The URL of the store; None if storage is a PersistentVolumeClaim."""
        return self.storage if self.claim is None else None

    def place(self, job: str) -> str:
        """Return the place of that job's checkpoints for its workers: the URL, or a folder of the mounted claim."""
        return self.url or f"{STORAGE_FOLDER}/{job}/checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """The job's greatest cost, in the currency of the pools' prices, and the date of its last step."""

    money: Annotated[Decimal | None, TextOf(MONEY, Decimal)] = None
    """The most that the job may cost: a decimal number in quotes with at most 4 decimals. When it is spent, the
    job is suspended until the limit is raised.
    """
    done_by: Annotated[datetime | None, TextOf(DATE_TIME, datetime.fromisoformat)] = None
    """The date of the last step, in RFC 3339 with a zone, such as 2026-12-24T18:00:00Z. The status and a condition say
    whether the job will meet it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A Kueue local queue."""

    name: Annotated[str, DNS_NAME]
    """The name of a LocalQueue in the job's namespace."""
    priority_class: Annotated[str | None, DNS_NAME] = None
    """The WorkloadPriorityClass of the workers; by default worker.template's priorityClassName."""
    growth_priority_class: Annotated[str | None, DNS_NAME] = None
    """A lower WorkloadPriorityClass for workers beyond the fewest with which the job trains, so that other jobs get
    quota before them or take it from them. By default priorityClass.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The whole spec of a job."""

    name: Annotated[str, Mark.NOT_IN_SPEC]
    namespace: Annotated[str, Mark.NOT_IN_SPEC] = "default"
    suspend: bool = False
    """True stops the job, after it has written a checkpoint, and releases its nodes. Later the job continues from that
    checkpoint, or at step 0 if it keeps none.
    """
    task: Annotated[TaskSpec, Mark.FIXED]
    """The model to train, and its data."""
    training: Annotated[TrainingSpec, Mark.FIXED]
    """How long to train, with which batch sizes and which precision."""
    topology: Annotated[TopologySpec, Mark.FOLLOWS]
    """The fixed part of the grid of workers."""
    elastic: Annotated[ElasticSpec | None, Mark.WHILE_SUSPENDED] = None
    """Lets the coordinator choose the rest of the grid for the available nodes. Without it the grid is fixed: the job
    waits for all its workers, then for replacements of lost ones.
    """
    redundancy: Annotated[RedundancySpec, Mark.WHILE_SUSPENDED] = field(default_factory=RedundancySpec)
    """How the job is protected against losses."""
    standby: StandbySpec = field(default_factory=StandbySpec)
    """Spare workers, which replace lost ones."""
    node_pools: Annotated[tuple[NodePool, ...], ListOf(16)] = ()
    """Where workers may run; the pools are tried in this order. By default on any node that fits."""
    spread: Annotated[SpreadSpec, Mark.FIXED] = field(default_factory=SpreadSpec)
    """How workers are spread over zones and nodes."""
    checkpoint: Annotated[CheckpointSpec | None, Mark.FIXED] = None
    """Where checkpoints are written, and how often."""
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    """The workers' pods. After a change the workers are replaced one by one."""
    queue: Annotated[QueueSpec | None, Mark.WHILE_SUSPENDED] = None
    """The Kueue queue in which workers wait for quota."""
    budget: BudgetSpec | None = None
    """The most that the job may cost, by the prices of the node pools, and the date by which it has to be done."""
    backoff_limit: Annotated[int, Integer(0)] = 6
    """The job ends after more worker failures than this without a committed step in between. A lost node is
    no failure.
    """
    progress_deadline_seconds: Annotated[int, Integer()] = 1800
    """Seconds that the job waits for any worker to finish a microbatch before it fails. A step may take as long as it
    needs.
    """
    ttl_seconds_after_finished: Annotated[int | None, Integer(0)] = None
    """Seconds from the job's end until it is deleted; by default never."""


@completes(TopologySpec)
def _complete_stages(values: Values) -> None:
    """Derive the number of stages from the split if only that is given, and record whether stages and pipelines were
    left open (`chooses_stages`, `chooses_pipelines`).
    """
    values["chooses_stages"] = values["split"] is None and values["stages"] is None
    values["chooses_pipelines"] = values["pipelines"] is None
    if values["stages"] is None and values["split"] is not None:
        values["stages"] = len(values["split"])


@completes(JobSpec)
def _complete_job(values: Values) -> None:
    """Record that pipelines are not chosen in a job without `elastic`: a fixed grid has one pipeline by default."""
    if values["elastic"] is None:
        values["topology"] = replace(values["topology"], chooses_pipelines=False)


def schedules(spec: JobSpec) -> tuple[PipelineSchedule, ...]:
    """Return the schedules from which the coordinator may choose; the first one is in force until it has chosen. There
    is only one if the manifest gives the schedule, or if the job has no `elastic`.
    """
    first = spec.topology.first_schedule
    chosen = spec.topology.schedule is None and spec.elastic is not None
    return (first, PipelineSchedule.ZB_H1) if chosen else (first,)


def in_force(spec: JobSpec) -> JobSpec:
    """Return the spec with Auto redundancy resolved for its grid by `RedundancySpec.on`, as if owners were apart."""
    if spec.redundancy.mode is not RedundancyMode.AUTO:
        return spec
    return replace(spec, redundancy=spec.redundancy.on(spec.topology.pipelines))


def stabilization_seconds(spec: JobSpec) -> float:
    return USUAL_STABILIZATION if spec.elastic is None else spec.elastic.stabilization_seconds


def gives_back(spec: JobSpec) -> bool:
    """Return whether the job may hold fewer workers than it could have, because its objective is Value."""
    return spec.elastic is not None and spec.elastic.objective is Objective.VALUE


def fewest_stages(spec: JobSpec) -> int:
    """Return the fewest stages that the grid may have."""
    return spec.elastic.min_stages if spec.elastic and spec.topology.chooses_stages else spec.topology.stages


def most_stages(spec: JobSpec) -> int:
    """Return the most stages that the grid may have."""
    topology = spec.topology
    if spec.elastic is None or not topology.chooses_stages:
        return topology.stages
    return max(1, min(MOST_STAGES, spec.elastic.max_workers // topology.pipelines))


def most_pipelines(spec: JobSpec) -> int:
    """Return the most pipelines that the grid may have."""
    topology, training = spec.topology, spec.training
    if spec.elastic is None or not topology.chooses_pipelines:
        return topology.pipelines
    room = min(spec.elastic.max_workers // fewest_stages(spec), MOST_PIPELINES)
    return max(1, min(room, training.groups if training.microbatches else 1))


def pod_spread(spec: JobSpec) -> SpreadPolicy:
    """Return the pods' spread policy. ZonePerPipeline becomes Interleave if the coordinator chooses the stages and may
    use several pipelines, because a pipeline's number of workers is then unknown when a pod is made.
    """
    policy = spec.spread.policy
    if policy is SpreadPolicy.ZONE_PER_PIPELINE and spec.topology.chooses_stages and most_pipelines(spec) > 1:
        return SpreadPolicy.INTERLEAVE
    return policy


def heeds_memory(spec: JobSpec) -> bool:
    """Return whether the coordinator fits the grid or the replicas into the workers' memory."""
    return spec.elastic is not None or spec.redundancy.mode is RedundancyMode.AUTO


def whole_workers(spec: JobSpec) -> int:
    """Return the number of workers of a fixed grid, or the most that a grid of the coordinator can use; no standbys."""
    topology = spec.topology
    if spec.elastic is None or not topology.chooses_stages:
        return topology.stages * most_pipelines(spec)
    return spec.elastic.max_workers if topology.chooses_pipelines else topology.pipelines * most_stages(spec)


def fewest_workers(spec: JobSpec) -> int:
    """Return the fewest workers with which a job begins or changes its grid."""
    asked = spec.elastic.min_workers if spec.elastic else 1
    return max(fewest_stages(spec) * spec.topology.pipelines, min(asked, whole_workers(spec)))


def wanted_workers(spec: JobSpec) -> int:
    """Return the number of requested workers, standby included."""
    return whole_workers(spec) + spec.standby.workers
