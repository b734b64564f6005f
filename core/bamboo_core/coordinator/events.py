"""What the coordinator is told and what it decides. The shells (local runner, operator, simulator) speak only this."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from bamboo_core.control.channel_events import ChannelClosed, Received, WorkerJoined
from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.control.protocol import Message
from bamboo_core.coordinator.checkpoint_counts import CheckpointCounts
from bamboo_core.job.spec import JobSpec, RedundancyMode
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Known for certain to be gone: its process exited, its pod or node was deleted.

    exit_code: from 0 up if it ended for reasons of its own, which counts towards backoffLimit; anything else is a
    disruption. removed: it was ended by the shell, because the coordinator had declared it lost before.
    """

    worker: WorkerId
    detail: str
    exit_code: int | None = None
    removed: bool = False


@dataclass(frozen=True, slots=True)
class WorkersAbsent:
    """A coordinator that has just been restarted knows these only from a plan, and its shell finds no trace of them:
    they were lost while nobody looked. Unlike those of WorkerLost they do not count as requested.
    """

    workers: frozenset[WorkerId]
    detail: str


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """The worker will be taken away in that many seconds. wanted: by us, who have no use for it any more. cause: for
    the user, if it is new.
    """

    worker: WorkerId
    seconds: float
    wanted: bool = False
    cause: "Emit | None" = None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The worker may stay after all."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RequestsWithdrawn:
    """So many of the workers that were asked for will not come, as nobody wants them any more (`surplus_requests`)."""

    count: int


@dataclass(frozen=True, slots=True)
class PricesTold:
    """What each worker that is there costs in an hour, and what more would, in the order in which they would come: so
    many at each price, and beyond those at the last one; (): that is not known.
    """

    workers: Mapping[WorkerId, float]
    more: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SpecChanged:
    """The user edited the manifest. Only what may change while the job runs is taken over."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; shells send one at least every 100 ms."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user or the shell stops the job: once its state is kept, or at once if it keeps no checkpoints."""

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
    | PricesTold
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
    """Let this worker go: it has been told to stop; end it if it does not."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Emit:
    """A decision that people are told of: a CamelCase reason and a sentence, for logs, events, conditions and metrics.

    final: it is how the job ended, which a shell may tell in another way.
    """

    reason: str
    message: str
    warning: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Takeover:
    """A finished takeover as the user sees it, in milliseconds by phase.

    decide_ms: from the first sign of the loss (a closed channel, a broken link) to the plan; reform_ms: from the plan's
    arrival until it is in force at the new owner; recompute_ms: until the lost work is repeated. step: the one in which
    it came; after it so many are committed.
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
    """The job is over; every worker has been told to stop."""

    outcome: Outcome
    reason: str
    message: str


Command = Send | AddWorkers | RemoveWorker | Emit | Finish


class WorkerState(StrEnum):
    """A worker's part, for display."""

    STARTING = "starting"
    STANDBY = "standby"
    SYNCING = "syncing"
    TRAINING = "training"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWrite:
    """A checkpoint that is being written: of that step, since so many seconds, with so many layers that are durable."""

    step: int
    seconds: float
    written: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """step: of the newest one; None if there is none, or none is known (yet). age: seconds since it was committed, None
    if before this coordinator. seconds, bytes: that it took, and has.

    place: where they are, without credentials. every_steps: from one to the next. first: the step with which the job
    began. restores: how often it went back to one; repeated: the steps that it did again, repeated_seconds: that they
    usually take.
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

    @property
    def restores(self) -> int:
        return sum(self.counts.restores.values())

    @property
    def repeated(self) -> int:
        return self.counts.repeated

    @property
    def repeated_seconds(self) -> float:
        return self.counts.repeated_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A straggler. seconds: that it takes for a microbatch of its stage; usual: that others would. told: a sentence."""

    worker: WorkerId
    pipeline: int
    stage: int
    seconds: float
    usual: float
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The job as a person sees it; made by `job_status.status`.

    protected: the stage's state is held by several workers, in step, and on several nodes where these are lost with
    several workers (`spread.workersPerNode`). crowded: nodes with more workers than that, and how many they have.
    lacks_room: the job does without copies that are asked for, since its workers have no room for them.
    """

    phase: str
    epoch: int
    step: int
    steps: int | None  # as many as are wanted; None: only the task's data can tell, and no worker has them yet
    first_loss: float | None
    loss: float | None
    losses: tuple[float, ...]  # of the newest steps
    lost_samples: int  # of the steps so far, those whose loss did not go into the step's
    step_seconds: float | None  # median of the recent steps
    samples_per_second: float | None
    eta_seconds: float | None
    grid: tuple[tuple[tuple[WorkerId, bool], ...], ...]  # [pipeline][stage] -> (owner, protected)
    workers: tuple[tuple[WorkerId, WorkerState], ...]
    preemptions: int
    notices: int
    takeovers: tuple[Takeover, ...]
    digests: tuple[str, ...]  # of each stage's final state, once known
    memory: tuple[tuple[WorkerId, Memory], ...] = ()  # what each worker said last
    traffic: tuple[tuple[WorkerId, Traffic], ...] = ()  # what each worker sends in a step, in the mean
    restarts: int = 0  # failures that counted towards the limit
    gradient_norm: float | None = None  # of the newest step, before clipping
    learning_rate: float | None = None  # of the newest step
    metrics: tuple[tuple[str, float | None], ...] = ()  # of the newest step, by name
    checkpoint: CheckpointSummary | None = None  # if the job keeps any
    evaluations: tuple[tuple[int, Mapping[str, float | None]], ...] = ()  # the newest: after which step, by metric
    best_evaluation: int | None = None  # after which step
    crowded: tuple[tuple[str, int], ...] = ()
    skipped_steps: int = 0  # since the coordinator was made: steps that left the model as it was
    trained_without: int = 0  # samples of steps since the coordinator was made whose loss did not go into them
    replicating: tuple[str, ...] = ()  # those of the unprotected for which a copy is being filled
    slow: tuple[SlowWorker, ...] = ()  # stragglers that are found, the slowest first
    stopped_early: str = ""  # why the job ends with fewer steps than are wanted
    grid_choice: str = ""  # which grid was chosen, what was expected of it and of others, if the job lets choose
    done_by: datetime | None = None  # by when the job is to be done, if that is said
    lacks_room: bool = False
    mode: RedundancyMode | None = None  # in force
    wanted: int = 0  # workers that the job asks for, those on standby included
    replicas: int | None = None  # in step, of the stage that has the fewest; other pipelines' owners count
    nodes: int | None = None  # that hold, in step, the stage which the fewest hold

    @property
    def unprotected(self) -> tuple[str, ...]:
        """The names of the stages that are not protected."""
        return tuple(cell_name(d, s) for d, row in enumerate(self.grid) for s, (_, held) in enumerate(row) if not held)


def cell_name(pipeline: int, stage: int) -> str:
    return f"pipeline {pipeline} stage {stage}"
