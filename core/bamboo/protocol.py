"""The control channel's messages: tagged, strictly validated JSON over one WebSocket per worker."""

from typing import Any, TypeVar

import msgspec

from bamboo.memory import Memory
from bamboo.names import PROTOCOL_VERSION
from bamboo.plan import Cell, Plan, WorkerId

MAX_MESSAGE_BYTES = 4 << 20
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


# worker -> coordinator


class Hello(Message, frozen=True):
    worker: WorkerId
    host: str
    port: int
    zone: str = ""
    pid: int = 0
    version: int = PROTOCOL_VERSION
    plan: Plan | None = None  # the newest plan known, after a reconnection


class Profile(Message, frozen=True):
    """Deterministic cost per layer (floating point operations, parameters), the input of the layer split."""

    costs: tuple[float, ...]


class WorkerReady(Message, frozen=True):
    """The task is loaded; from now on plans may count on this worker."""


class Heartbeat(Message, frozen=True):
    """memory: of the newest step, about once a second."""

    step: int
    doing: str = ""
    memory: Memory | None = None


class PeerDown(Message, frozen=True):
    """My link to that peer broke; it is being formed again."""

    peer: WorkerId


class PeerUp(Message, frozen=True):
    """A link that was reported down stands again."""

    peer: WorkerId


class PlanApplied(Message, frozen=True):
    epoch: int


class ReplicaSynced(Message, frozen=True):
    """Said by the owner: that replica of my cell has caught up with me."""

    cell: Cell
    replica: WorkerId


class Report(Message, frozen=True):
    """What this worker has: the version of each stage's state it holds, and the newest commit it knows (-1: none)."""

    committed: int
    held: dict[int, int]


class LeftBehind(Message, frozen=True):
    """This worker owns a cell whose state is too old: what it takes to catch up is gone."""

    cell: Cell


class StepCommitted(Message, frozen=True):
    """Said by the root's owner. generation: of the layout that ran the step. microbatches: whose losses it counts.

    seconds: the time since the same owner's previous commit; 0 if there is none. loss, gradient_norm: None if they are
    not finite, which JSON cannot say.
    """

    step: int
    generation: int
    loss: float | None
    gradient_norm: float | None
    microbatches: int
    seconds: float


class TakenOver(Message, frozen=True):
    """Said by a cell's new owner once it has caught up: milliseconds from the plan's arrival.

    forwards, backwards: repeated; reused: those that had been computed in advance.
    """

    epoch: int
    cell: Cell
    step: int
    reform_ms: float
    recompute_ms: float
    forwards: int
    backwards: int
    reused: int


class CellFinished(Message, frozen=True):
    cell: Cell
    digest: str


class NoticeReceived(Message, frozen=True):
    """This worker was told to go (SIGTERM, metadata); `seconds` is what is left."""

    seconds: float


class Saved(Message, frozen=True):
    """The stage's final weights are in the folder."""

    stage: int


class WorkerFailed(Message, frozen=True):
    reason: str
    message: str


class Bye(Message, frozen=True):
    pass


ToCoordinator = (
    Hello | WorkerReady | Profile | Heartbeat | PeerDown | PeerUp | PlanApplied | ReplicaSynced | Report | LeftBehind
    | StepCommitted | TakenOver | CellFinished | NoticeReceived | Saved | WorkerFailed | Bye
)  # fmt: skip


# coordinator -> worker


class Welcome(Message, frozen=True):
    """The job, and the secret by which workers of this job know each other."""

    manifest: dict[str, Any]
    secret: str


class ProfileRequest(Message, frozen=True):
    pass


class ReportRequest(Message, frozen=True):
    pass


class SendPlan(Message, frozen=True):
    plan: Plan


class Save(Message, frozen=True):
    """Write the stage's final weights to that folder."""

    stage: int
    path: str


class Stop(Message, frozen=True):
    reason: str
    message: str = ""


class Refused(Message, frozen=True):
    """This worker was declared lost, or never belonged here; it must exit."""

    reason: str
    message: str = ""


ToWorker = Welcome | ProfileRequest | ReportRequest | SendPlan | Save | Stop | Refused

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[ToCoordinator] = msgspec.json.Decoder(ToCoordinator)
_from_coordinator: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_worker(data: bytes | str) -> ToCoordinator:
    """Raises ValueError naming what is wrong."""
    return _decode(_from_worker, data)


def decode_from_coordinator(data: bytes | str) -> ToWorker:
    """Raises ValueError naming what is wrong."""
    return _decode(_from_coordinator, data)


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes | str) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"malformed message: {error}") from None
