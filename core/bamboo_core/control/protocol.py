"""The control channel's messages: tagged, strictly validated JSON over one WebSocket per worker."""

from typing import Annotated, Any

import msgspec

from bamboo_core.checkpoint.data_record import DataRecord
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control.digests import Digest
from bamboo_core.control.evaluations import EarlyStop
from bamboo_core.control.guard import SpotCheckDiffers, StateSums
from bamboo_core.control.memory import Memory, SentTraffic
from bamboo_core.control.message import MOST as MOST
from bamboo_core.control.message import Count as Count
from bamboo_core.control.message import Message as Message
from bamboo_core.control.platform import Platform
from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_core.job.spec import MOST_LAYERS
from bamboo_core.names import PROTOCOL_VERSION
from bamboo_core.planning.plan import Cell, CheckpointId, Plan, Port, Short, WorkerId
from bamboo_core.planning.splits.stage_times import MOST_TIMES, StageTimes
from bamboo_core.planning.steps.layer_bytes import LayerBytes

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
MOST_NUMBER = 1e100
MOST_METRICS = 64  # of a step, or of an evaluation
MOST_EVALUATIONS = 64  # in one message
LOSS_SCALE = "loss_scale"  # the metric of a step in fp16
Number = Annotated[float, msgspec.Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]  # of fp32, and sums of them
Metrics = Annotated[dict[Short, Number | None], msgspec.Meta(max_length=MOST_METRICS)]
# by state, the optimizer steps that it has seen; a metric of None is not finite
Evaluations = Annotated[dict[Count, Metrics], msgspec.Meta(min_length=1, max_length=MOST_EVALUATIONS)]
LOGGERS_AWAITED = "LoggersAwaited"  # the reason of a worker's warning: it ends once its loggers are done
INITIAL_WEIGHTS = "InitialWeights"  # the reason of what is no warning either: which first values were taken
MOST_TEXT = 4000  # characters of what a worker says in words
Said = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Cost = Annotated[float, msgspec.Meta(ge=0, le=1e24)]

MOST_PASSED = 100  # checkpoints that are told of


# worker -> coordinator


class Hello(Message, frozen=True):
    """A worker's first word to the coordinator."""

    worker: Short
    host: Short
    port: Port
    # zone, node: where the worker is. The shell that started it knows better, and says so in its place
    zone: Short = ""
    node: Short = ""
    pid: Count = 0
    version: int = PROTOCOL_VERSION
    platform: Platform = Platform()
    plan: Plan | None = None  # the newest plan known, after a reconnection


class Profile(Message, frozen=True):
    """Deterministic cost per layer (floating point operations, parameters), the input of the layer split."""

    costs: Annotated[tuple[Cost, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    # if the coordinator chooses the grid
    layers: Annotated[tuple[LayerBytes, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    memory: Count = 0  # bytes of the worker's device; 0 if no limit is known


class WorkerReady(Message, frozen=True):
    """The task is loaded; from now on plans may count on this worker."""

    samples: Count = 0  # of its dataset
    steps: Count = 0  # of the job, which may follow from that. 0: not said
    data: DataRecord | None = None  # what of it decides bits


class Heartbeat(Message, frozen=True):
    """A worker's sign of life, with what it is doing.

    Another thread says it than the one that works, so a heartbeat alone does not prove that the worker works.
    """

    step: Count
    doing: str = ""
    # memory, times: of the newest step, about once a second
    memory: Memory | None = None
    busy: Seconds = 0.0  # seconds since it began what it is inside
    times: Annotated[tuple[StageTimes, ...], msgspec.Meta(max_length=MOST_TIMES)] | None = None
    headroom: Seconds | None = None  # how many times as much memory as now there is for it; None if that is not known
    traffic: SentTraffic | None = None  # what it has sent to other workers; None before it has seen a step
    backwards: Count = 0  # microbatches that it has run back since it began


class PeerDown(Message, frozen=True):
    """My link to that peer broke; it is being formed again."""

    peer: WorkerId


class PeerUp(Message, frozen=True):
    """A link that was reported down stands again."""

    peer: WorkerId


class PlanApplied(Message, frozen=True):
    epoch: Count


class ReplicaSynced(Message, frozen=True):
    """The owner of a cell says that a replica of it has caught up."""

    cell: Cell
    replica: WorkerId


class CheckpointFound(Message, frozen=True):
    """The answer to FindCheckpoint."""

    number: Count
    checkpoint: CheckpointId | None = None  # None if there is none to go on from
    passed: Annotated[tuple[Said, ...], msgspec.Meta(max_length=MOST_PASSED)] = ()  # why newer ones are not taken
    problem: Said = ""  # the store does not tell; then the rest says nothing
    other_data: Said = ""  # the one to go on from was trained with other data than this worker has, which ones


class CheckpointBegun(Message, frozen=True):
    """The root's owner says, if it is asked again, that a commit has carried that wish, and which checkpoint came of
    it.
    """

    number: Count
    checkpoint: CheckpointId


class PartsWritten(Message, frozen=True):
    """These layers' files of a checkpoint are durable."""

    checkpoint: CheckpointId
    parts: Annotated[tuple[CheckpointPart, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    stall: Seconds = 0.0  # for so many seconds this worker has copied its layers


class CheckpointCommitted(Message, frozen=True):
    """The manifest of a checkpoint is written."""

    checkpoint: CheckpointId
    tidied: bool = False  # the message is said again, as what is not to be kept any longer is removed now, or cannot be


class CheckpointFailed(Message, frozen=True):
    """A part or the manifest of a checkpoint cannot be written."""

    checkpoint: CheckpointId
    message: Said


class StateHeld(Message, frozen=True):
    """A worker keeps these layers in host memory, in their state after the commit with which this split of the layers
    ends.
    """

    checkpoint: CheckpointId
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class CopiesHeld(Message, frozen=True):
    """A worker keeps these layers of a checkpoint in host memory. The checkpoint is being written, or is the newest
    one.
    """

    checkpoint: CheckpointId
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class RestoreFailed(Message, frozen=True):
    """This worker cannot begin with the state that the plan of that origin names."""

    origin: Count
    checkpoint: CheckpointId
    message: Said
    damaged: bool  # nobody ever can


class Report(Message, frozen=True):
    """What this worker has: the version of each stage's state it holds, and the newest commit it knows (-1: none)."""

    committed: int
    held: dict[int, int]


class LeftBehind(Message, frozen=True):
    """This worker owns a cell whose state is too old: what it takes to catch up is gone."""

    cell: Cell


class StepCommitted(Message, frozen=True):
    """The root's owner says that a step is committed."""

    step: Count
    generation: Count  # of the layout that ran the step
    # loss, gradient_norm: None if they are not finite, which JSON cannot say
    loss: Number | None
    gradient_norm: Number | None  # the global one, before clipping
    microbatches: Count  # whose losses it counts
    seconds: float  # the time since the same owner's previous commit; 0 if there is none
    learning_rate: Number | None = None  # None if it is not known
    # the one that is written of the state after this step, and the number that it was asked for with
    checkpoint: tuple[Count, CheckpointId] | None = None
    skipped: bool = False  # the step left the model as it was, since its loss or gradient is not finite
    # what else is measured of it, by name; None for what is not finite
    metrics: Metrics = msgspec.field(default_factory=dict)


class Evaluated(Message, frozen=True):
    """The root's owner tells the newest evaluations. Each message repeats those before, of which the coordinator may
    have missed some.
    """

    states: Evaluations
    early_stop: EarlyStop | None = None  # the newest state is the job's last one


class TakenOver(Message, frozen=True):
    """A cell's new owner says that it has caught up. Milliseconds count from the plan's arrival."""

    epoch: Count
    cell: Cell
    step: Count
    reform_ms: float
    recompute_ms: float
    # forwards, backwards: repeated
    forwards: Count
    backwards: Count


class CellFinished(Message, frozen=True):
    """A worker has finished a cell's last step."""

    cell: Cell
    digest: Digest  # the stage's share of the model's, see `digests`


class NoticeReceived(Message, frozen=True):
    """This worker was told to go (SIGTERM, metadata); `seconds` is what is left."""

    seconds: float


class HistoryKept(Message, frozen=True):
    """The events of that source up to that number are in the job's history."""

    source: Short
    number: Count


class WorkerWarning(Message, frozen=True):
    """Something beside the training does not work, which goes on. LOGGERS_AWAITED: after the end of the job, which is
    no warning; the worker ends once they are done. INITIAL_WEIGHTS: what task.initialFrom has come to,
    """

    reason: Short
    message: Said


class WorkerFailed(Message, frozen=True):
    reason: str
    message: str


class Bye(Message, frozen=True):
    pass


ToCoordinator = (
    Hello
    | WorkerReady
    | Profile
    | Heartbeat
    | PeerDown
    | PeerUp
    | PlanApplied
    | ReplicaSynced
    | Report
    | LeftBehind
    | StepCommitted
    | Evaluated
    | CheckpointFound
    | CheckpointBegun
    | PartsWritten
    | CheckpointCommitted
    | CheckpointFailed
    | StateHeld
    | CopiesHeld
    | RestoreFailed
    | TakenOver
    | CellFinished
    | NoticeReceived
    | Saved
    | WeightsCommitted
    | HistoryKept
    | WorkerWarning
    | StateSums
    | SpotCheckDiffers
    | WorkerFailed
    | Bye
)


# coordinator -> worker


class Welcome(Message, frozen=True):
    """The job, and the secret by which workers of this job know each other."""

    manifest: dict[str, Any]
    secret: str
    history: str = ""  # its URL; "" if none is kept


class ProfileRequest(Message, frozen=True):
    pass


class ReportRequest(Message, frozen=True):
    pass


class SendPlan(Message, frozen=True):
    """The newest plan, whole, whatever this worker had before."""

    plan: Plan


class FindCheckpoint(Message, frozen=True):
    """Which checkpoint in the job's store can the job go on from? number: of the question."""

    number: Count
    bad: tuple[CheckpointId, ...] = ()  # not one of these


class TakeCheckpoint(Message, frozen=True):
    """The coordinator asks the root to let the state of step `at`, or of the next one, be kept as a checkpoint."""

    number: Count
    at: Count
    writers: tuple[tuple[WorkerId, ...], ...]  # of each stage, who share its layers, and write them to the store
    hold: bool = False  # nobody begins another step after that, and all keep what they hold in host memory
    # as the job is to end, the root commits no other step until it is wished for another checkpoint, or asked for a
    # report, as by a coordinator that does not know of the pause
    pause: bool = False


class KeepLastState(Message, frozen=True):
    """The coordinator asks those who have finished stages to let their state after the last step be that
    checkpoint.
    """

    checkpoint: CheckpointId
    writers: tuple[tuple[WorkerId, ...], ...]  # of each stage, who share its layers, and write them to the store


class CommitCheckpoint(Message, frozen=True):
    """The coordinator asks for the manifest of a checkpoint, all parts of which are durable."""

    checkpoint: CheckpointId
    parts: tuple[CheckpointPart, ...]
    score: float | None = None  # of the state, the larger the better


class DropCopies(Message, frozen=True):
    """Copies of these checkpoints in host memory are of no use any more: there is a newer one, or it was given up."""

    checkpoints: tuple[CheckpointId, ...]


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happened to the job, for its history."""

    number: Count  # of the source's events, from 1
    time: float  # seconds since 1970
    reason: str
    message: str
    warning: bool = False


class HistoryEvents(Message, frozen=True):
    """The coordinator tells the root what happened to the job, for its history."""

    source: Short  # who tells; a coordinator has a name of its own
    events: tuple[HistoryEvent, ...]


class Stop(Message, frozen=True):
    """The coordinator tells a worker to end."""

    reason: str
    message: str = ""
    # the number of a saving of the final weights that nobody will make the folder's content
    discard: Count | None = None


class Refused(Message, frozen=True):
    """This worker was declared lost, or never belonged here; it must exit."""

    reason: str
    message: str = ""


ToWorker = (
    Welcome
    | ProfileRequest
    | ReportRequest
    | SendPlan
    | FindCheckpoint
    | TakeCheckpoint
    | KeepLastState
    | CommitCheckpoint
    | DropCopies
    | HistoryEvents
    | Save
    | CommitWeights
    | Stop
    | Refused
)
