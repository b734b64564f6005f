"""The coordinator's events and commands, which its shells (local runner, operator, simulator) exchange with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial

from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.control.protocol import ChannelClosed, Message, Received, WorkerJoined
from bamboo_core.coordinator.replacing import replace
from bamboo_core.histogram import DURATIONS, STALLS, Histogram
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The event that a worker is certainly gone: its process exited, or its pod or node was taken away.

    exit_code: 0 or more if the worker ended by itself; this may count towards backoffLimit (`judge_end`). None or
    negative: it was ended from outside, or in an unknown way. removed: the shell ended the worker, which had to leave.
    """

    worker: WorkerId
    detail: str
    exit_code: int | None = None
    removed: bool = False


@dataclass(frozen=True, slots=True)
class WorkersAbsent:
    """The event that workers of the plan were lost while no coordinator ran: they have no pod or process any more.
    `Membership.requested` does not count them.
    """

    workers: frozenset[WorkerId]
    detail: str


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """A notice that a worker will be taken away in `seconds`.

    wanted: the shell gives the worker back, because the job does not need it or another one replaces it. cause: an
    event for the user, emitted if the notice is new.
    """

    worker: WorkerId
    seconds: float
    wanted: bool = False
    cause: "Emit | None" = None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The withdrawal of a worker's notice: the worker may stay."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RequestsWithdrawn:
    """Withdrawal of `count` requested workers by the shell, because they are surplus (`surplus_requests`)."""

    count: int


@dataclass(frozen=True, slots=True)
class PricesReported:
    """Prices of workers, in money per hour.

    workers: the prices of present workers, as far as the shell reports them. more: (price, number of workers) of others
    that may come, in the order in which they would come, () if unknown; the last price holds for all beyond these.
    """

    workers: Mapping[WorkerId, float]
    more: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SpecChanged:
    """The spec of an edited manifest. Fields that no edit may change are as before (`edits.apply_edit_to_manifest`)."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Tick:
    """The passing of time, sent every 50 to 100 ms by local runner and operator, and as needed by the simulator."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A request by the user or the shell to stop the job, after a last checkpoint if one is needed and possible."""

    reason: str = "Interrupted"
    message: str = "stopped by the user"


Event = (
    WorkerJoined
    | Received
    | ChannelClosed
    | WorkerLost
    | WorkersAbsent
    | PreemptionNotice
    | NoticeWithdrawn
    | RequestsWithdrawn
    | PricesReported
    | SpecChanged
    | Tick
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class Send:
    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class AddWorkers:
    count: int


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """A command to the shell to end a worker's process or pod, after a grace period in which it may stop by itself."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Emit:
    """A message to users for logs, events, conditions and metrics: a CamelCase reason and a sentence.

    final: the message reports the end of the job, which a shell may show in another way.
    """

    reason: str
    message: str
    warning: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Takeover:
    """A finished takeover of a cell (pipeline, stage) of `victim` by `worker`, with the milliseconds of its phases.

    decide_ms: from the first sign of a loss (a closed channel, a broken link) to the plan; 0 without a loss. reform_ms:
    from the arrival of the plan until it is in force at the new owner. recompute_ms: from then until the lost work is
    repeated. step: number of the interrupted step, from 1. notice: the plan replaced no lost worker. forwards,
    backwards: numbers of repeated forwards and backwards.
    """

    epoch: int
    victim: WorkerId
    worker: WorkerId
    pipeline: int
    stage: int
    step: int
    notice: bool
    decide_ms: float
    reform_ms: float
    recompute_ms: float
    forwards: int
    backwards: int

    @property
    def pause_ms(self) -> float:
        return self.decide_ms + self.reform_ms + self.recompute_ms


class Outcome(StrEnum):
    COMPLETE = "Complete"
    FAILED = "Failed"
    UNRECOVERABLE = "Unrecoverable"
    INTERRUPTED = "Interrupted"


@dataclass(frozen=True, slots=True)
class Finish:
    """A command to the shell to end the job; other commands ask the workers that have joined to stop."""

    outcome: Outcome
    reason: str
    message: str


Command = Send | AddWorkers | RemoveWorker | Emit | Finish


class WorkerState(StrEnum):
    """The present activity of a worker, for display."""

    STARTING = "starting"
    STANDBY = "standby"
    SYNCING = "syncing"
    TRAINING = "training"
    LEAVING = "leaving"


class AbandonReason(StrEnum):
    """The reason why the coordinator abandons a checkpoint."""

    WRITER_LOST = "WriterLost"  # before all parts were durable
    STORE_FAILED = "StoreFailed"  # a worker could not write its part or the manifest
    TOO_SLOW = "TooSlow"
    TOO_LATE = "TooLate"  # the root heard of it after the last step
    WENT_BACK = "WentBack"  # the job went back to an older one, or begins a step anew on another grid


class RestoreCause(StrEnum):
    """The reason why a job goes back to a checkpoint or to step 0, or ends because it cannot."""

    STAGE_LOST = "StageLost"
    WORKERS_GONE = "WorkersGone"
    RESULTS_DIFFER = "ResultsDiffer"  # two workers computed different results, and one of them is wrong
    SUSPENDED = "Suspended"  # the newest steps were not kept, or were lost before this coordinator existed


class RestoreProblem(StrEnum):
    """The reason why a worker could not start from a checkpoint."""

    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    """Counts and durations of a job's checkpoints and restores.

    durations: for each saved checkpoint, the seconds that its writing took, by the reports to the coordinator.
    stalls: for each, the seconds for which training waited, on the worker that waited longest. bytes: size of all
    durable parts, whether or not their checkpoint was completed. repeated: number of committed steps that the job had
    to run again; repeated_seconds: the time that these steps usually take.
    """

    durations: Histogram = field(default_factory=partial(Histogram.of, DURATIONS))
    stalls: Histogram = field(default_factory=partial(Histogram.of, STALLS))
    bytes: int = 0
    abandoned: Mapping[AbandonReason, int] = field(default_factory=dict)
    restores: Mapping[RestoreCause, int] = field(default_factory=dict)
    problems: Mapping[RestoreProblem, int] = field(default_factory=dict)
    repeated: int = 0
    repeated_seconds: float = 0.0

    @property
    def restored(self) -> int:
        """The number of restores, for all causes."""
        return sum(self.restores.values())

    def saved(self, seconds: float, stall: float) -> "CheckpointCounts":
        return replace(self, durations=self.durations.having(seconds), stalls=self.stalls.having(stall))

    def abandoning(self, reason: AbandonReason) -> "CheckpointCounts":
        return replace(self, abandoned={**self.abandoned, reason: self.abandoned.get(reason, 0) + 1})

    def restoring(self, cause: RestoreCause) -> "CheckpointCounts":
        return replace(self, restores={**self.restores, cause: self.restores.get(cause, 0) + 1})

    def unusable(self, problem: RestoreProblem) -> "CheckpointCounts":
        return replace(self, problems={**self.problems, problem: self.problems.get(problem, 0) + 1})

    def repeating(self, steps: int, step_seconds: float) -> "CheckpointCounts":
        seconds = self.repeated_seconds + steps * step_seconds
        return replace(self, repeated=self.repeated + steps, repeated_seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWrite:
    """A checkpoint in progress: its step, the seconds since it began, and how many of its layers are durable."""

    step: int
    seconds: float
    written: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """The job's newest checkpoint, and the counts of all its checkpoints, for display.

    step: step of the newest checkpoint; None if none is known. age: seconds since its commit; None if its time is
    unknown. seconds, bytes: duration and size of the checkpoint saved last, 0 if unknown. place: the storage, without
    credentials. every_steps: steps between checkpoints. first: the step with which the job began, 0 if unknown.
    """

    step: int | None
    age: float | None
    seconds: float
    bytes: int
    place: str = ""
    every_steps: int = 1
    first: int = 0
    writing: CheckpointWrite | None = None
    counts: CheckpointCounts = field(default_factory=CheckpointCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A straggler, for display. seconds: its time for a microbatch of its stage. usual: the expected time."""

    worker: WorkerId
    pipeline: int
    stage: int
    seconds: float
    usual: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of the job for display, metrics and summaries; `job_status.status` builds it.

    protected: several workers hold the stage's state in step, on several nodes if a node may run several workers
    (`spread.workersPerNode`). crowded: nodes with more than `spread.workersPerNode` workers, each with its number of
    workers; () if the limit is 1. lacks_room: workers have too little memory for all requested replicas.
    """

    phase: str
    epoch: int
    step: int
    steps: int | None  # None until a worker has read the length of the task's data
    first_loss: float | None
    loss: float | None
    losses: tuple[float, ...]  # of the newest steps
    lost_samples: int  # samples of all steps so far without part in a step's loss
    step_seconds: float | None  # median of the recent steps
    samples_per_second: float | None
    eta_seconds: float | None
    grid: tuple[tuple[tuple[WorkerId, bool], ...], ...]  # [pipeline][stage] -> (owner, protected)
    workers: tuple[tuple[WorkerId, WorkerState], ...]
    preemptions: int
    notices: int
    takeovers: tuple[Takeover, ...]
    digests: tuple[str, ...]  # of each stage's final state, once known
    memory: tuple[tuple[WorkerId, Memory], ...] = ()  # the newest report of each worker
    traffic: tuple[tuple[WorkerId, Traffic], ...] = ()  # mean of what each worker sends in a step
    restarts: int = 0  # failures that counted towards the limit
    gradient_norm: float | None = None  # of the newest step, before clipping
    learning_rate: float | None = None  # of the newest step
    metrics: tuple[tuple[str, float | None], ...] = ()  # of the newest step, by name
    checkpoint: CheckpointSummary | None = None  # if the job keeps any
    evaluations: tuple[tuple[int, Mapping[str, float | None]], ...] = ()  # the newest: (step, values by metric)
    best_evaluation: int | None = None  # its step
    crowded: tuple[tuple[str, int], ...] = ()
    skipped_steps: int = 0  # steps without an update, since the coordinator was created
    trained_without: int = 0  # samples without part in a loss, since the coordinator was created
    replicating: tuple[str, ...] = ()  # names of unprotected cells whose replicas are being filled
    slow: tuple[SlowWorker, ...] = ()  # stragglers, the slowest first
    stopped_early: str = ""  # why the job ends before its last step
    grid_choice: str = ""  # elastic jobs: why they have this grid and number of workers, or why no grid fits
    done_by: datetime | None = None  # the manifest's deadline
    lacks_room: bool = False
    mode: RedundancyMode | None = None  # in force
    wanted: int = 0  # workers that the job should have, including standbys
    ready: int = 0  # workers that have loaded their task
    replicas: int | None = None  # copies in step of the least replicated stage; other pipelines' owners count
    nodes: int | None = None  # nodes that hold the least spread stage in step

    @property
    def unprotected(self) -> tuple[str, ...]:
        """The names of the cells that are not protected."""
        return tuple(cell_name(d, s) for d, row in enumerate(self.grid) for s, (_, held) in enumerate(row) if not held)


def cell_name(pipeline: int, stage: int) -> str:
    return f"pipeline {pipeline} stage {stage}"
