"""The control channel's messages: tagged, strictly validated JSON over one WebSocket per worker.

The root, which many messages name, is the worker that owns cell (0, 0) and commits the steps.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from bamboo_core.checkpoint.layout import MOST_LAYERS, CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointPart, DataRecord
from bamboo_core.control.digests import Digest
from bamboo_core.control.evaluations import EarlyStop
from bamboo_core.control.memory import Memory, SentTraffic
from bamboo_core.control.platform import Platform
from bamboo_core.names import PROTOCOL_VERSION
from bamboo_core.planning.plan import Cell, Plan, Port, Short, WorkerId
from bamboo_core.planning.profile import LayerBytes
from bamboo_core.planning.splits.speeds import MOST_TIMES, StageTimes

MOST = 1 << 53  # bounds counts: every JSON reader represents it exactly
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


def _as_text(value: object) -> str:
    """Convert a subclass of str, which the JSON encoder does not know, to str. Raises TypeError for anything else."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.json.Encoder(enc_hook=_as_text)


def to_json(value: Any) -> bytes:
    """Encode a value as JSON. Characters that UTF-8 cannot hold (surrogates in a file's name) are backslash-escaped."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_escaped(msgspec.to_builtins(value)))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in value]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in value.items()}
    return value


MOST_DETAIL = 1000
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # checksum of a tensor's bits


# worker -> coordinator


class StateSums(Message, frozen=True):
    """A worker's report on its copy of a stage's state at a version (number of steps): checksums by tensor name."""

    stage: Count
    version: Count
    sums: dict[str, Sum]


class SpotCheckDiffers(Message, frozen=True):
    """A worker's report that it recomputed a cell's microbatch and got other bits than the cell's owner, which may be
    the same worker. step: the checked step, from 0. message: the difference, and the result of a repetition.
    """

    cell: Cell
    step: Count
    message: Annotated[str, msgspec.Meta(max_length=MOST_DETAIL)]


Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
MOST_NUMBER = 1e100
MOST_METRICS = 64  # in a step or an evaluation
MOST_EVALUATIONS = 64  # in a message
LOSS_SCALE = "loss_scale"  # the metric of a step in fp16
Number = Annotated[float, msgspec.Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]  # fp32 numbers, and sums of them
Metrics = Annotated[dict[Short, Number | None], msgspec.Meta(max_length=MOST_METRICS)]
# by the number of optimizer steps of the evaluated state; a metric that is not finite is None
Evaluations = Annotated[dict[Count, Metrics], msgspec.Meta(min_length=1, max_length=MOST_EVALUATIONS)]
LOGGERS_AWAITED = "LoggersAwaited"  # reason of a WorkerWarning: the worker ends once its loggers are done
INITIAL_WEIGHTS = "InitialWeights"  # reason of a WorkerWarning that only reports which initial weights were used
MOST_TEXT = 4000  # characters of a worker's text
Said = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Cost = Annotated[float, msgspec.Meta(ge=0, le=1e24)]

MOST_PASSED = 100  # checkpoints in a CheckpointFound


# worker -> coordinator


class Hello(Message, frozen=True):
    """A worker's first message to the coordinator."""

    worker: Short
    host: Short
    port: Port
    # zone, node: where the worker is; "" if the worker does not know. Its shell may replace both
    zone: Short = ""
    node: Short = ""
    pid: Count = 0
    version: int = PROTOCOL_VERSION
    platform: Platform = Platform()
    plan: Plan | None = None  # the newest known plan, after a reconnection


class Profile(Message, frozen=True):
    """A worker's report on each layer's cost (operations, or `Task.costs`), by which layers are split over stages."""

    costs: Annotated[tuple[Cost, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    # layers, memory: sent if the coordinator fits the grid or the replicas into memory (`heeds_memory`)
    layers: Annotated[tuple[LayerBytes, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    memory: Count = 0  # bytes of the worker's device; 0 if unknown


class WorkerReady(Message, frozen=True):
    """A worker's report that it has loaded its task, so plans may use the worker."""

    samples: Count = 0  # in its dataset
    steps: Count = 0  # of the job, counted from the dataset if that decides; 0: unknown
    data: DataRecord | None = None  # the properties of the data on which results depend


class Heartbeat(Message, frozen=True):
    """A worker's sign of life, with its current activity. A separate thread sends it, so a heartbeat alone does not
    prove that the worker makes progress.
    """

    step: Count
    doing: str = ""
    # times: of the newest microbatches, at most once a second; None: not sent this time
    memory: Memory | None = None
    busy: Seconds = 0.0  # seconds since its current activity began
    times: Annotated[tuple[StageTimes, ...], msgspec.Meta(max_length=MOST_TIMES)] | None = None
    headroom: Seconds | None = None  # usable memory divided by used memory, sent with `times`; None if unknown
    traffic: SentTraffic | None = None  # to other workers; None before the first step
    backwards: Count = 0  # microbatches that have run backwards since the worker began


class PeerDown(Message, frozen=True):
    """A worker's report that its link to a peer broke; the worker keeps trying to reconnect."""

    peer: WorkerId


class PeerUp(Message, frozen=True):
    """A worker's report that a link reported down is up again."""

    peer: WorkerId


class PlanApplied(Message, frozen=True):
    epoch: Count


class ReplicaSynced(Message, frozen=True):
    """A cell owner's report that a replica of the cell is in step with the owner."""

    cell: Cell
    replica: WorkerId


class CheckpointFound(Message, frozen=True):
    """A worker's answer to FindCheckpoint."""

    number: Count  # that of the request
    checkpoint: CheckpointId | None = None  # None if there is none to resume from
    passed: Annotated[tuple[Said, ...], msgspec.Meta(max_length=MOST_PASSED)] = ()  # why newer ones are not used
    problem: Said = ""  # why the store cannot be read; if set, the fields other than `number` mean nothing
    other_data: Said = ""  # if the checkpoint was trained with other data than this worker has: the difference


class CheckpointBegun(Message, frozen=True):
    """The root's answer to a TakeCheckpoint that a commit has already fulfilled: that commit's checkpoint or cut."""

    number: Count
    checkpoint: CheckpointId


class PartsWritten(Message, frozen=True):
    """A worker's report that the files of these layers of a checkpoint are durable."""

    checkpoint: CheckpointId
    parts: Annotated[tuple[CheckpointPart, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    stall: Seconds = 0.0  # seconds in which the worker copied its layers
    common: dict[str, Any] = msgspec.field(default_factory=dict)  # state that belongs to no layer, for the manifest


class CheckpointCommitted(Message, frozen=True):
    """A worker's report that a checkpoint's manifest is written."""

    checkpoint: CheckpointId
    tidied: bool = False  # sent again with True once outdated checkpoints are removed, or cannot be


class CheckpointFailed(Message, frozen=True):
    """A worker's report that it cannot write a part or the manifest of a checkpoint."""

    checkpoint: CheckpointId
    message: Said


class StateHeld(Message, frozen=True):
    """A worker's report on the layers of a cut's state that it has copied to host memory, for another split."""

    checkpoint: CheckpointId
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class CopiesHeld(Message, frozen=True):
    """A worker's report on the layers of a checkpoint, the newest or one in progress, that it holds in host memory."""

    checkpoint: CheckpointId
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class RestoreFailed(Message, frozen=True):
    """A worker's report that it cannot read the checkpoint from which a plan starts."""

    origin: Count  # that of the plan
    checkpoint: CheckpointId
    message: Said
    damaged: bool  # no worker can ever read it


class Report(Message, frozen=True):
    """A worker's answer to ReportRequest: the stages' states that it holds."""

    committed: int  # the newest committed step that it knows; -1: none
    held: dict[int, int]  # version (number of steps), by stage


class LeftBehind(Message, frozen=True):
    """A cell owner's report that its copy of the cell's state is too old to catch up from."""

    cell: Cell


class StepCommitted(Message, frozen=True):
    """The root's report on a committed step: its loss, metrics and duration."""

    step: Count
    generation: Count  # of the layout that ran the step
    # loss, gradient_norm: None if not finite, which JSON cannot express, or beyond MOST_NUMBER
    loss: Number | None
    gradient_norm: Number | None  # the global one, before clipping
    microbatches: Count  # over which the loss is taken
    seconds: float  # since the same owner's previous commit; 0 if there is none
    learning_rate: Number | None = None  # None if unknown
    # if the step begins a checkpoint of the state after it: the number of the request, and the checkpoint
    checkpoint: tuple[Count, CheckpointId] | None = None
    skipped: bool = False  # the step left the model unchanged, because its loss or gradient is not finite
    # further metrics of the step, by name; None: not finite
    metrics: Metrics = msgspec.field(default_factory=dict)


class Evaluated(Message, frozen=True):
    """The root's report on the newest evaluations, with earlier ones that the coordinator may have missed."""

    states: Evaluations
    early_stop: EarlyStop | None = None  # set if the job ends early at the newest state, whose metrics may be {}


class TakenOver(Message, frozen=True):
    """The report of a cell's new owner that it has caught up. reform_ms: time from the plan's arrival until it was in
    force. recompute_ms: time from then until the lost work was repeated.
    """

    epoch: Count
    cell: Cell
    step: Count
    reform_ms: float
    recompute_ms: float
    # forwards, backwards: the number of repeated ones
    forwards: Count
    backwards: Count


class CellFinished(Message, frozen=True):
    """A worker's report that it has finished the job's last step in a cell."""

    cell: Cell
    digest: Digest  # the stage's part of the model's digest, see `digests`


class NoticeReceived(Message, frozen=True):
    """A worker's report of a preemption notice (SIGTERM, the cloud's metadata): the worker has `seconds` left."""

    seconds: float


class HistoryKept(Message, frozen=True):
    """The root's report that the events of `source` up to `number` are in the job's history."""

    source: Short
    number: Count


class WorkerWarning(Message, frozen=True):
    """A worker's message for the user about a problem that does not stop training. Two reasons are mere information:
    LOGGERS_AWAITED (the job has ended, and the worker ends once its loggers are done) and INITIAL_WEIGHTS (which
    weights task.initialFrom has loaded).
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
    | HistoryKept
    | WorkerWarning
    | StateSums
    | SpotCheckDiffers
    | WorkerFailed
    | Bye
)


# coordinator -> worker


class Welcome(Message, frozen=True):
    """The coordinator's answer to Hello: the job's manifest, and the secret for authentication between workers."""

    manifest: dict[str, Any]
    secret: str
    history: str = ""  # URL; "" if none is kept
    last_state: str = ""  # URL of the store of a job that keeps only its last state


class ProfileRequest(Message, frozen=True):
    pass


class ReportRequest(Message, frozen=True):
    pass


class SendPlan(Message, frozen=True):
    """The coordinator's message to a worker with the complete newest plan."""

    plan: Plan


class FindCheckpoint(Message, frozen=True):
    """The coordinator's request to a worker to find the checkpoint in the job's store from which the job resumes."""

    number: Count  # repeated in the answer
    bad: tuple[CheckpointId, ...] = ()  # checkpoints to pass over


class TakeCheckpoint(Message, frozen=True):
    """The coordinator's request to the root for a checkpoint or cut (`hold`) of step `at`'s state or a later one."""

    number: Count
    at: Count
    writers: tuple[tuple[WorkerId, ...], ...]  # by stage, the workers that share its layers and write them to the store
    hold: bool = False  # no worker begins another step after it, and all keep their layers in host memory
    # the job is to end: the root commits no other step until it gets another TakeCheckpoint, or a ReportRequest from a
    # coordinator that does not know of the pause
    pause: bool = False


class KeepLastState(Message, frozen=True):
    """The coordinator's request to workers that have finished stages to keep the job's last state as `checkpoint`."""

    checkpoint: CheckpointId
    writers: tuple[tuple[WorkerId, ...], ...]  # by stage, the workers that share its layers and write them to the store


class HoldState(Message, frozen=True):
    """The coordinator's request to workers to copy their layers of a state to host memory, for another split. The root
    must not commit the next step; a worker that already knows that step's commit ignores the request.
    """

    checkpoint: CheckpointId


class CommitCheckpoint(Message, frozen=True):
    """The coordinator's request to a worker to write the manifest of a checkpoint whose parts are all durable."""

    checkpoint: CheckpointId
    parts: tuple[CheckpointPart, ...]
    score: float | None = None  # of the state, the larger the better
    common: dict[str, Any] = msgspec.field(default_factory=dict)  # as in PartsWritten


class DropCopies(Message, frozen=True):
    """The coordinator's request to drop copies of abandoned or replaced checkpoints, and files of unfinished ones."""

    checkpoints: tuple[CheckpointId, ...]


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of the job, for its history."""

    number: Count  # counted by the source, from 1
    time: float  # seconds since 1970
    reason: str
    message: str
    warning: bool = False


class HistoryEvents(Message, frozen=True):
    """Events for the job's history, which the coordinator sends to the root."""

    source: Short  # the sender; each coordinator has a name of its own
    events: tuple[HistoryEvent, ...]


class Stop(Message, frozen=True):
    """The coordinator's order to a worker to exit."""

    reason: str
    message: str = ""


class Refused(Message, frozen=True):
    """The coordinator's refusal of a worker, which must exit.

    Examples: it was declared lost, is not in the plan, has another protocol version or identity, or other data than the
    job. reason: CamelCase.
    """

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
    | HoldState
    | CommitCheckpoint
    | DropCopies
    | HistoryEvents
    | Stop
    | Refused
)


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The event that a worker has opened a channel and sent its Hello, for the first time or on reconnection."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    worker: WorkerId


ChannelEvent = WorkerJoined | Received | ChannelClosed
