"""Frames: the messages between workers (data plane), with payload and tensors, addressed by content, not by sender.

`FrameKind` lists the kinds; below it are the payloads, and the tensors that a frame of each kind carries. `read` checks
a received frame once, before use. A peer knows the job's secret, so its facts are trusted; their form is not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import repeat
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch

from bamboo_core.checkpoint.layout import MOST_LAYERS, CheckpointId
from bamboo_core.control.evaluations import Course, EarlyStop
from bamboo_core.control.protocol import MOST_METRICS, Evaluations
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.loss_scale import LossScale

MAX_BODY: Final = 1 << 40  # a stage's whole state: 12 bytes per parameter with AdamW
MAX_DIMENSIONS: Final = 16

DTYPES: Final = {  # by the names that safetensors files give them; those have no C128
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor of any dtype and shape, without `requires_grad`, as a view of writable bytes."""
    if tensor.dtype is torch.float32 and tensor.numel():
        return tensor.numpy().data.cast("B")  # the most common dtype; twice as fast
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unsendable(tensor: torch.Tensor, *, real: bool = False) -> str:
    """Return why a tensor cannot be sent; "" if it can. real: complex numbers are refused."""
    allowed = [dtype for dtype in DTYPE_NAMES if not (real and dtype.is_complex)]
    if tensor.dtype not in allowed:
        return f"{tensor.dtype}, expected one of {', '.join(sorted(str(d).removeprefix('torch.') for d in allowed))}"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, expected torch.strided"
    return f"{tensor.dim()} dimensions, expected at most {MAX_DIMENSIONS}" if tensor.dim() > MAX_DIMENSIONS else ""


class FrameKind(IntEnum):
    """The kinds of frames. Frames of these kinds carry no tensors: 10 to 16 (ANNOUNCE to LAYERS_WANTED), READY,
    COMMIT, LAYERS_LACKED, HISTORY, KEPT_ALL, EVALUATIONS, REPEAT and SUMMED.
    """

    ACTIVATION = 1  # outputs of a stage's forward, to the next stage's cell; part = EVALUATED of an evaluation's batch
    GRADIENT = 2  # gradients of a stage's inputs, to the previous stage's cell
    CONTRIBUTION = 3  # a chunk of one pipeline's sum of a stage's gradients; part = the sum's first group
    RESULT = 4  # a reduced chunk of a stage's gradients; part = chunk
    TIED = 5  # gradients of tied parameters; part = source stage
    READY = 6  # a cell has finished the step; to the root; part = number of the cell; payload: cell, norm, losses
    COMMIT = 7  # from the root: the step is final; payload: norm, loss, microbatches, generation, epoch
    SYNC = 8  # a stage's final gradients, to a replica or an owner; payload: the newest commits
    ANNOUNCE = 10  # from a replica to its owner: the version that it holds; payload: version, secured
    HEARD = 11  # to the root: the newest commits that this worker knows; payload: a list of (step, commit)
    ASK = 12  # to all: the sender repeats a committed step of this cell, and needs its results or inputs
    LOGGED = 13  # the answer's end: no more boundary frames; payload: the first step in the log, by own cell
    LOGGED_BULK = 14  # the same on the link of the large frames
    LOGGED_STATE = 15  # the same on the link of the states
    LAYERS_WANTED = 16  # to a holder of a cut's or a checkpoint's state; payload: the state, and which layers
    LAYER = 17  # a layer's state, requested or of a whole stage; part = layer; payload: facts, and what it belongs to
    LAYERS_LACKED = 18  # the answer for layers that are not here; payload: like the request's
    HISTORY = 19  # to the root, or from it: commits not known to be in the job's history; payload: a list
    PARTIAL_SUM = 20  # of a portion of a cell, to its owner; microbatch, part = first, end; payload: losses, metrics
    SPOT_CHECK = 21  # the inputs of a cell's microbatch, for the worker that checks it; payload: the results
    KEPT_SUM = 22  # of finished groups of a cell, to its keeper or a new owner; otherwise like PARTIAL_SUM
    KEPT_ALL = 23  # to a new owner: the sender has sent the KEPT_SUM frames of the first groups, up to a gap
    EVALUATIONS = 24  # to the root, or from it: the evaluations that this worker knows; payload: metrics, by state
    REPEAT = 25  # to a cell's runners: a neighbouring stage, part, lacks its frames from this microbatch of the step on
    SUMMED = 26  # from a cell's owner to a runner: the sum of these microbatches is here; microbatch, part = first, end


EVALUATED = 1  # `part` of an activation of an evaluation's batch; 0 in training
NO_CELL = -1  # the pipeline and stage of a layer that was asked for

BOUNDARY = frozenset({FrameKind.ACTIVATION, FrameKind.GRADIENT})  # frames that cross the boundaries of stages
BULK = frozenset(
    {
        FrameKind.SYNC,
        FrameKind.CONTRIBUTION,
        FrameKind.RESULT,
        FrameKind.TIED,
        FrameKind.LOGGED_BULK,
        FrameKind.PARTIAL_SUM,
        FrameKind.KEPT_SUM,
        FrameKind.KEPT_ALL,
        FrameKind.SPOT_CHECK,
    }
)
REDUCED = frozenset({FrameKind.CONTRIBUTION, FrameKind.RESULT})  # microbatch = bucket of the stage's gradients
STATES = frozenset({FrameKind.LAYER, FrameKind.LOGGED_STATE})
ANSWERS_END = (FrameKind.LOGGED, FrameKind.LOGGED_BULK, FrameKind.LOGGED_STATE)  # one on each link


class Address(NamedTuple):
    """The name of a frame's content. pipeline, stage: the cell that it is for or about. part: see `FrameKind`."""

    kind: FrameKind
    pipeline: int
    stage: int
    step: int
    microbatch: int = 0
    part: int = 0

    @property
    def cell(self) -> Cell:
        return Cell(self.pipeline, self.stage)


def is_of_microbatch(address: Address) -> bool:
    """Return whether a frame is an activation or a gradient of a training step's microbatch."""
    return address.kind in BOUNDARY and address.part != EVALUATED


class FrameFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The optional payload of ACTIVATION, GRADIENT, CONTRIBUTION, RESULT, TIED and REPEAT: flags, a loss's weight."""

    # of each floating point tensor that crosses a boundary, whether it needs a gradient, or has one; empty: all do
    gradients: tuple[bool, ...] = ()
    weight: float | None = None  # of the microbatch's loss if that is a sum, with gradients
    again: bool = False  # see `Frame.again`

    @classmethod
    def of(cls, gradients: Iterable[bool], weight: float | None = None) -> "FrameFacts | None":
        """Return the facts of tensors that cross a boundary; None if all of them need or have a gradient and no weight
        is given.
        """
        flags = tuple(gradients)
        return None if weight is None and all(flags) else cls(gradients=() if all(flags) else flags, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message between workers: an address, tensors and a payload."""

    address: Address
    epoch: int  # the sender's
    origin: int = 1  # of the states that it belongs to (`Plan.origin`)
    tensors: tuple[torch.Tensor, ...] = ()
    payload: Any = None  # of the type that FORMS gives for the kind

    @property
    def again(self) -> bool:
        """Whether the payload marks the frame as repeated; for REPEAT, whether logged frames are wanted again, too."""
        return getattr(self.payload, "again", False) is True

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors of an activation. Reading this sets `requires_grad` of floating point ones as its flags say."""
        floats = [part for part in self.tensors if part.is_floating_point()]
        for part, need in zip(floats, (self.payload and self.payload.gradients) or repeat(True), strict=False):
            part.requires_grad_(need)
        return self.tensors

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients in a GRADIENT frame, of floating point tensors; None for each tensor without a gradient."""
        given, flags = iter(self.tensors), self.payload and self.payload.gradients
        return tuple([next(given) if one else None for one in flags]) if flags else self.tensors


MOST_DECISIONS: Final = 16
MOST_MEMORY: Final = 64  # numbers that a decision remembers
MOST_FROZEN: Final = 1_000_000  # names or patterns
MOST_TERMS: Final = 64  # terms of an exact sum: as many 53-bit numbers, without overlap, cover a float's range
Since = list[tuple[Cell, int]]  # the first step in a worker's log, by cell of its own
Terms = Annotated[list[float], msgspec.Meta(max_length=MOST_TERMS)]
Sums = Annotated[dict[str, tuple[Terms, Terms]], msgspec.Meta(max_length=MOST_METRICS)]  # and their weights


class RefusedFrame(ValueError):
    """Error because a frame violates the form of its kind. The worker drops the frame and keeps the link."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's report to the root that it has finished a step, or the evaluation after the last step."""

    cell: Cell
    squared_norm: Terms  # of its gradient, as terms with exactly its sum (`step_report`)
    losses: dict[int, float]  # by microbatch, of a last stage
    weights: dict[int, float] = {}  # if the losses are sums
    # by name, of the losses that the stage's layers add, each microbatch's times its weight
    added: dict[str, Terms] = {}
    # metrics, evaluation: by name, the terms of a sum and of its weight
    metrics: Sums = {}
    evaluation: Sums = {}


class PartialSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of some microbatches of a cell (a portion or finished groups), by microbatch, in addition to the sums of
    their gradients: losses and their weights, metrics with weights, and losses that layers add.
    """

    losses: dict[int, float]
    weights: dict[int, float]
    metrics: dict[int, Annotated[dict[str, tuple[float, float]], msgspec.Meta(max_length=MOST_METRICS)]]
    added: dict[int, list[tuple[str, float]]]
    again: bool = False  # the frame has been sent before


class CheckpointMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that a commit requests."""

    number: int  # of the coordinator's request
    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,32}$")]  # of the attempt
    writers: tuple[tuple[WorkerId, ...], ...]  # of each stage, the workers that share the writing of its layers
    hold: bool = False  # no step follows in this split of the layers, and all workers keep what they hold


class HistoryMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commit's facts for the job's history."""

    attempt: Annotated[int, msgspec.Meta(ge=0, lt=10**6)]  # of the job, counted as in the history; 0: unknown
    written: Annotated[int, msgspec.Meta(ge=0)]  # commits of steps before this number are in the history
    at: float  # when the root committed, seconds since 1970
    seconds: float = 0.0  # since the root's commit before this one; 0: unknown
    rate: float | None = None  # the learning rate; None: unknown


class Decided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a task's decisions for the next step."""

    learning_rate: float = 1.0  # a factor
    frozen: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_FROZEN)] = ()  # parameters, or patterns
    stops: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_DECISIONS)] = ()  # the decisions that end training
    # by decision and name, passed to it the next time
    memory: Annotated[
        dict[str, Annotated[dict[str, int | float | bool | None], msgspec.Meta(max_length=MOST_MEMORY)]],
        msgspec.Meta(max_length=MOST_DECISIONS),
    ] = {}


class CommonState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of the state that belongs to no layer. It follows from the commits alone, so all workers agree on it.

    loss_scale: the scale for the next step, in fp16. decided: the decisions for the next step, if the task has any.
    course: the course of the evaluations of all earlier states, if they may end the job. metric: the goal and metric of
    that course, or "".
    """

    loss_scale: LossScale | None = None
    decided: Decided | None = None
    course: Course = Course()
    metric: str = ""


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root's decision that makes a step final: the step's results, and settings from the next step on."""

    norm: float  # of the scaled gradients
    loss: float
    microbatches: int  # how many the loss covers
    generation: int  # the next step's layout
    epoch: int  # the plan in force from then on
    checkpoint: CheckpointMark | None = None  # keep the state after this step
    skipped: bool = False  # no worker applies the step's gradients, as they or the loss are not finite
    # by metric, of the state before this step, if it was evaluated; a commit after the last step has only this, and
    # covers no microbatches
    evaluation: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)] = {}
    # the job ends with the state before this step, and no worker trains this step; such a commit covers no
    # microbatches, either
    early_stop: EarlyStop | None = None
    history: HistoryMark | None = None  # if one is kept
    common: CommonState = CommonState()  # after this step
    scale: float = 1.0  # the factor of the summed gradients
    # by name; NaN if there is no number
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)] = {}


Commits = list[tuple[int, Commit]]  # by step


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version of a stage's state that a replica holds, and the version that its gradients let it reach."""

    version: int
    secured: int


class SpotSums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checksums of a cell's work on a microbatch, for the worker that repeats it and compares: of the data, of each
    layer's outputs, of the stage's outputs and losses, and of the gradients of its inputs and parameters.
    """

    # how many of the frame's tensors, the first ones, are inputs; the others are the gradients given to its backward
    inputs: Annotated[int, msgspec.Meta(ge=0)]
    taken: FrameFacts | None  # of the inputs
    given: FrameFacts | None  # of these gradients
    data: Annotated[int, msgspec.Meta(ge=0)]
    layers: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MOST_LAYERS)]
    outputs: Annotated[int, msgspec.Meta(ge=0)]
    gradients: Annotated[int, msgspec.Meta(ge=0)]
    parameters: Annotated[int, msgspec.Meta(ge=0)]


class LayersWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for layers of a cut's or a checkpoint's state, or an answer with the layers that the sender lacks."""

    checkpoint: CheckpointId
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class ReplicaStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts that a worker needs in addition to the layers when it gets a stage's state: the number of layers, the
    layout's generation at the state's version, and the newest commits.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    generation: int
    commits: Commits


class LayerPayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer's state (`LayerState`): of the requested cut or checkpoint, or of a stage sent as a whole (`filling`)."""

    tensors: tuple[str, ...]  # the names of the frame's tensors, in order
    scalars: dict[str, int | float | bool | None]
    names: dict[str, str]
    common: CommonState
    checkpoint: CheckpointId | None = None
    filling: ReplicaStart | None = None


class PayloadForm(NamedTuple):
    """The form of the frames of one kind: type of the payload, number of tensors."""

    payload: Any  # its type
    fewest: int = 0
    most: float = 0
    flat: bool = False  # the tensors are pieces of a stage's gradient


FORMS: Final = {
    FrameKind.ACTIVATION: PayloadForm(FrameFacts | None, 1, torch.inf),
    FrameKind.GRADIENT: PayloadForm(FrameFacts | None, 0, torch.inf),  # integers have none
    FrameKind.CONTRIBUTION: PayloadForm(FrameFacts | None, 1, 1, flat=True),
    FrameKind.RESULT: PayloadForm(FrameFacts | None, 1, 1, flat=True),
    FrameKind.TIED: PayloadForm(FrameFacts | None, 1, torch.inf, flat=True),
    FrameKind.READY: PayloadForm(Ready),
    FrameKind.COMMIT: PayloadForm(Commit),
    FrameKind.SYNC: PayloadForm(Commits, 1, 1, flat=True),
    FrameKind.ANNOUNCE: PayloadForm(Announce),
    FrameKind.HEARD: PayloadForm(Commits),
    FrameKind.ASK: PayloadForm(None),
    FrameKind.LOGGED: PayloadForm(Since),
    FrameKind.LOGGED_BULK: PayloadForm(Since),
    FrameKind.LOGGED_STATE: PayloadForm(Since),
    FrameKind.SPOT_CHECK: PayloadForm(SpotSums, 0, torch.inf),
    FrameKind.LAYERS_WANTED: PayloadForm(LayersWanted),
    FrameKind.LAYER: PayloadForm(LayerPayload, 0, torch.inf),
    FrameKind.LAYERS_LACKED: PayloadForm(LayersWanted),
    FrameKind.HISTORY: PayloadForm(Commits),
    FrameKind.PARTIAL_SUM: PayloadForm(PartialSum, 1, torch.inf, flat=True),
    FrameKind.KEPT_SUM: PayloadForm(PartialSum, 1, torch.inf, flat=True),
    FrameKind.KEPT_ALL: PayloadForm(None),
    FrameKind.EVALUATIONS: PayloadForm(Evaluations),
    FrameKind.REPEAT: PayloadForm(FrameFacts | None),  # again: what is in the log is to be sent again, too
    FrameKind.SUMMED: PayloadForm(None),
}


def read(frame: Frame) -> Frame:
    """Check a received frame; return it with its payload parsed as its kind's type. Raises RefusedFrame."""
    form, count = FORMS[frame.address.kind], len(frame.tensors)
    if not form.fewest <= count <= form.most:
        raise RefusedFrame(f"{count} tensors")
    if frame.payload is None and frame.address.kind in BOUNDARY:
        return frame  # most frames are like this
    for tensor in frame.tensors if form.flat else ():
        if tensor.dtype != torch.float32 or tensor.dim() != 1:
            raise RefusedFrame(f"a gradient of {tensor.dtype} {list(tensor.shape)}")
    try:
        payload = msgspec.convert(frame.payload, form.payload)
    except msgspec.ValidationError as error:
        raise RefusedFrame(f"payload: {error}") from error
    if isinstance(payload, SpotSums) and payload.inputs > count:
        raise RefusedFrame(f"{count} tensors, {payload.inputs} of them inputs")
    if isinstance(payload, LayerPayload):
        if len(set(payload.tensors)) != count:
            raise RefusedFrame(f"{count} tensors and {len(set(payload.tensors))} names of them")
        if (payload.checkpoint is None, payload.filling is None) != (
            frame.address.pipeline != NO_CELL,
            frame.address.pipeline == NO_CELL,
        ):
            raise RefusedFrame("a layer of no state")
    return frame if payload is frame.payload else replace(frame, payload=payload)
