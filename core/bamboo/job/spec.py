"""What a BambooJob asks for, as frozen values. `bamboo.job.manifest` is the only maker and checks every rule.

Absent parts are None; lists are tuples. Durations are seconds; field names are the manifest's in snake_case.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from bamboo.job.placement_spec import (
    CleanPodPolicy,
    DisruptionBudget,
    NodePool,
    RolloutSpec,
    SpreadPolicy,
    SpreadSpec,
    TransportType,
    VerifyMode,
    WorkerSpec,
)
from bamboo.job.training_spec import TrainingSpec
from bamboo.storage.url import shown_url

MOST_LAYERS, MOST_REPLICAS = 10_000, 3  # of a model; of a stage's state
MOST_WORKERS, MOST_STAGES = 10_000, 1024
AUTO = "Auto"  # instead of a number of stages: the coordinator chooses
DEFAULT_MANAGER = "bamboo.dev/operator"


class RedundancyMode(StrEnum):
    NONE = "None"
    LAZY_FORWARD = "LazyForward"
    EAGER_FORWARD = "EagerForward"
    EAGER_BACKWARD = "EagerBackward"


class ReplicaPlacement(StrEnum):
    """Where replica state lives."""

    DEVICE = "Device"
    HOST = "Host"


class Resume(StrEnum):
    """Latest: start from the newest complete checkpoint if there is one. Never: only from one that the job has written
    itself, else at step 0.
    """

    LATEST = "Latest"
    NEVER = "Never"


class StragglerPolicy(StrEnum):
    """What is done about workers that are slower than others, and about layers that take longer than was counted.

    Mitigate: a standby worker takes the place of a slow one, or it gets fewer layers. Report: they are only shown.
    """

    MITIGATE = "Mitigate"
    REPORT = "Report"
    IGNORE = "Ignore"


class FailureAction(StrEnum):
    RESTART_WORKER = "RestartWorker"
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"  # replace the worker without counting against backoffLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """entrypoint: "module:function", a `build(config) -> Task`; config: JSON values only."""

    entrypoint: str
    config: Mapping[str, Any] = field(default_factory=dict)


class PipelineSchedule(StrEnum):
    """In which order a stage's forwards and backwards run; see docs/design/engine.md."""

    ONE_F_ONE_B = "1F1B"
    ZB_H1 = "ZBH1"  # weight gradients by themselves, later than those that the stage before waits for


class ScheduleChoice(StrEnum):
    """What a manifest says of the schedule. AUTO: the coordinator chooses it where it chooses the grid."""

    AUTO = "Auto"
    ONE_F_ONE_B = PipelineSchedule.ONE_F_ONE_B.value
    ZB_H1 = PipelineSchedule.ZB_H1.value


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpec:
    """lookahead: forwards by which a stage is ahead of the next one beyond plain 1F1B; see docs/design/engine.md.

    stages: with `chooses_stages` the fewest that the coordinator may choose; the manifest says none then, or Auto.
    flows_per_link: connections for large frames with TCP. split: layers of each stage; None: as their costs say.
    shard_optimizer: with one stage, each worker holds the optimizer's state of a part of the layers; see shards.md.
    """

    stages: int
    pipelines: int = 1
    lookahead: int = 1
    schedule: ScheduleChoice = ScheduleChoice.AUTO
    flows_per_link: int = 4
    split: tuple[int, ...] | None = None
    shard_optimizer: bool = False
    transport: TransportType = TransportType.TCP
    chooses_stages: bool = False

    @property
    def first_schedule(self) -> PipelineSchedule:
        """By which a job runs as long as no other one was chosen."""
        auto = self.schedule is ScheduleChoice.AUTO
        return PipelineSchedule.ONE_F_ONE_B if auto else PipelineSchedule(self.schedule.value)


class Objective(StrEnum):
    """What the grid is chosen for. None: it is not. Throughput: the most samples a second that workers can train.

    Value: the most samples for their price, of all that are about as fast; workers that add less than they cost are
    given back.
    """

    NONE = "None"
    THROUGHPUT = "Throughput"
    VALUE = "Value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """Bounds within which the grid follows the capacity; by default the number of pipelines stays as it is.

    objective: by which the coordinator chooses stages and pipelines among all grids within the bounds; NONE: it does
    not, and pipelines have the stages of the topology. min_stages: without an objective, with fewer workers than stages
    the layers are split anew over those that are there, down to so many. max_stages, max_workers: only with an
    objective; None: as many as the topology has. If the coordinator chooses the stages there always are max_workers,
    which bound the stages, too.
    """

    min_pipelines: int
    max_pipelines: int
    min_stages: int = 1
    objective: Objective = Objective.NONE
    max_stages: int | None = None
    max_workers: int | None = None
    stabilization_seconds: int = 120
    straggler_policy: StragglerPolicy = StragglerPolicy.MITIGATE

    @property
    def chooses_grid(self) -> bool:
        return self.objective is not Objective.NONE

    @property
    def gives_back(self) -> bool:
        """May the job hold fewer workers than it could have?"""
        return self.objective is Objective.VALUE

    def most_stages(self, topology: TopologySpec) -> int:
        workers = min(MOST_STAGES, self.most_workers(topology))
        return self.max_stages or (workers if topology.chooses_stages else topology.stages)

    def most_workers(self, topology: TopologySpec) -> int:
        """That run stages."""
        return self.max_workers or topology.stages * topology.pipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancySpec:
    """replicas: of each stage's state; none with mode None. transfer_mbps: MB/s, at most, of a state that is sent."""

    mode: RedundancyMode = RedundancyMode.EAGER_FORWARD
    replicas: int = 1
    placement: ReplicaPlacement = ReplicaPlacement.DEVICE
    transfer_mbps: int = 500
    verify: VerifyMode = VerifyMode.NONE

    @property
    def kept(self) -> int:  # replicas that there should be of each stage's state
        return 0 if self.mode is RedundancyMode.NONE else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbySpec:
    workers: int = 0
    stages: int = 0  # of which one of them keeps replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """Exactly one of the two is set. claim_name: of a persistent volume claim in the job's namespace."""

    uri: str | None = None
    claim_name: str | None = None


def storage_place(uri: str | None, claim_name: str | None) -> str:
    """Where checkpoints are, for a person: without credentials."""
    return shown_url(uri) if uri is not None else f"claim {claim_name}"


USUAL_STEPS: Final = 200  # from one checkpoint to the next, unless steps are long


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """every_steps: from one to the next; None: as the coordinator finds right, USUAL_STEPS as long as nothing is known.
    keep_in_memory: workers keep what they have written of the newest one, and go back with that.

    keep_best: each state that is evaluated is kept, and the best one for good. allow_other_data: the job goes on from
    one that was trained with other data.
    """

    storage: StorageSpec
    every_steps: int | None = None
    keep_latest: int = 3
    keep_in_memory: bool = True
    keep_best: bool = False
    resume: Resume = Resume.LATEST
    allow_other_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """In the currency of the pools' prices. money: for the whole job; when it is spent, the job is suspended.
    money_per_hour: that the workers may cost at any time. done_by: when the last step is to be done; with its zone.
    """

    money: Decimal | None = None
    money_per_hour: Decimal | None = None
    done_by: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A Kueue local queue."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    name: str
    on_exit_codes: tuple[int, ...]
    action: FailureAction


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """The first rule that matches decides; without one the failure counts. Disruptions never count."""

    backoff_limit: int = 6
    rules: tuple[FailureRule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: str
    namespace: str = "default"
    suspend: bool = False
    managed_by: str = DEFAULT_MANAGER
    task: TaskSpec
    training: TrainingSpec
    topology: TopologySpec
    elastic: ElasticSpec
    redundancy: RedundancySpec = field(default_factory=RedundancySpec)
    standby: StandbySpec = field(default_factory=StandbySpec)
    node_pools: tuple[NodePool, ...] = ()
    spread: SpreadSpec = field(default_factory=SpreadSpec)
    checkpoint: CheckpointSpec | None = None
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    queue: QueueSpec | None = None
    budget: BudgetSpec | None = None
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    active_deadline_seconds: int | None = None
    progress_deadline_seconds: int = 1800
    ttl_seconds_after_finished: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    disruption_budget: DisruptionBudget = DisruptionBudget.ONE_AT_A_TIME


def schedules(spec: JobSpec) -> tuple[PipelineSchedule, ...]:
    """Those that the coordinator may choose from; the first one until it has. One if there is no choice of a grid, by
    which it knows what steps take, and with compiled layers, whose weight gradients cannot be postponed.
    """
    first = spec.topology.first_schedule
    chosen = spec.topology.schedule is ScheduleChoice.AUTO and spec.elastic.chooses_grid and not spec.training.compile
    return (first, PipelineSchedule.ZB_H1) if chosen else (first,)


def wanted_pipelines(spec: JobSpec) -> int:
    """As many as the coordinator asks workers for."""
    if spec.elastic.chooses_grid:
        return spec.topology.pipelines
    return max(spec.topology.pipelines, spec.elastic.max_pipelines)


def pod_spread(spec: JobSpec) -> SpreadPolicy:
    """Which pods are to be in the same zone. Those of a job whose grid the coordinator chooses cannot be made for one
    of its pipelines, whose number is not known yet: they go where nodes are, and pipelines are formed zone by zone.
    """
    policy = spec.spread.policy
    if policy is SpreadPolicy.ZONE_PER_PIPELINE and spec.elastic.chooses_grid and spec.elastic.max_pipelines > 1:
        return SpreadPolicy.INTERLEAVE
    return policy


def whole_workers(spec: JobSpec) -> int:
    """Of the grid that the manifest says; of one that is chosen from the beginning as many as it may have."""
    topology = spec.topology
    return spec.elastic.most_workers(topology) if topology.chooses_stages else topology.stages * topology.pipelines


def fewest_workers(spec: JobSpec) -> int:
    """With fewer a job that has trained nothing never begins."""
    stages = spec.elastic.min_stages if spec.elastic.chooses_grid else spec.topology.stages
    return stages * spec.elastic.min_pipelines


def wanted_workers(spec: JobSpec) -> int:
    """Those on standby included."""
    if spec.elastic.chooses_grid:
        return spec.elastic.most_workers(spec.topology) + spec.standby.workers
    return spec.topology.stages * wanted_pipelines(spec) + spec.standby.workers
