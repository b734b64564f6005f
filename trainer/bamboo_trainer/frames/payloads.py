"""The payload and tensors of frames of each kind, in addition to their address.

Received frames are checked here, once, before use. A peer knows the job's secret, so its facts are trusted; their form
is not.
"""

from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.evaluations import Course, EarlyStop
from bamboo_core.control.protocol import MOST_METRICS, Evaluations
from bamboo_core.job.spec import MOST_LAYERS
from bamboo_core.planning.plan import Cell, WorkerId
from bamboo_trainer.frames.frame import BOUNDARY, NO_CELL, Frame, FrameFacts, FrameKind
from bamboo_trainer.loss_scale import LossScale

MOST_DECISIONS: Final = 16
MOST_MEMORY: Final = 64  # numbers that a decision remembers
MOST_FROZEN: Final = 1_000_000  # names or patterns
MOST_TERMS: Final = 64  # numbers of 53 bits that do not overlap, from the smallest to the largest there are
Since = list[tuple[Cell, int]]  # the first step in a worker's log, by cell of its own
Terms = Annotated[list[float], msgspec.Meta(max_length=MOST_TERMS)]
Sums = Annotated[dict[str, tuple[Terms, Terms]], msgspec.Meta(max_length=MOST_METRICS)]  # and their weights


class RefusedFrame(ValueError):
    """A frame violates the form of its kind. It is dropped, and the link stays, as later frames can be read."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell has finished a step."""

    cell: Cell
    squared_norm: Terms  # of its gradient, as terms with exactly its sum (`exact_sum`)
    losses: dict[int, float]  # by microbatch, of a last stage
    weights: dict[int, float] = {}  # if the losses are sums
    # by name, of the losses that the stage's layers add, each microbatch's times its weight
    added: dict[str, Terms] = {}
    # metrics, evaluation: by name, the terms of a sum and of its weight
    metrics: Sums = {}
    evaluation: Sums = {}


class PartialSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of some of a cell's microbatches, in addition to their gradients' sums: losses and their weights, metrics
    with theirs, and what layers add.
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
    writers: tuple[tuple[WorkerId, ...], ...]  # of each stage, the workers that share its layers
    hold: bool = False  # no step follows in this split of the layers, and all workers keep what they hold


class HistoryMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commit's facts for the job's history."""

    attempt: Annotated[int, msgspec.Meta(ge=0, lt=10**6)]  # of the job, counted as in the history; 0: unknown
    written: Annotated[int, msgspec.Meta(ge=0)]  # the commits before this one are in the history
    at: float  # when the root committed, seconds since 1970
    seconds: float = 0.0  # since its commit before; 0: unknown
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
    """The part of the state that belongs to no layer. It follows from the commits alone, so all workers have the same.

    loss_scale: of the next step, in fp16. decided: for the next step, if the task has decisions. course: of the
    evaluations of all earlier states, if they may end the job. metric: its goal and metric.
    """

    loss_scale: LossScale | None = None
    decided: Decided | None = None
    course: Course = Course()
    metric: str = ""


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root's decision on a step."""

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
    # the job ends with this evaluation, with the state before this step, which is not trained; such a commit has
    # nothing else, either
    early_stop: EarlyStop | None = None
    history: HistoryMark | None = None  # if one is kept
    common: CommonState = CommonState()  # after this step
    scale: float = 1.0  # the factor of the summed gradients
    # by name; NaN if there is no number
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)] = {}


Commits = list[tuple[int, Commit]]  # by step


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version that a replica holds, and the one it can reach alone; its digest, if that is the first version."""

    version: int
    secured: int
    digest: str


class SpotSums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checksums of a cell's microbatch: of its data, read from the dataset; of the outputs after each layer, and as a
    whole with losses; of the gradients of its inputs, and of the stage's parameters.
    """

    # the first tensors of the frame, its inputs; the others are the gradients that its backward took
    inputs: Annotated[int, msgspec.Meta(ge=0)]
    taken: FrameFacts | None  # of the inputs
    given: FrameFacts | None  # of these gradients
    data: Annotated[int, msgspec.Meta(ge=0)]
    layers: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MOST_LAYERS)]
    outputs: Annotated[int, msgspec.Meta(ge=0)]
    gradients: Annotated[int, msgspec.Meta(ge=0)]
    parameters: Annotated[int, msgspec.Meta(ge=0)]


class LayersWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of a cut's or a checkpoint's state."""

    checkpoint: CheckpointId
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_LAYERS)]


class ReplicaStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica needs in addition to a stage's layers: how many they are, the layout's generation at their
    version, and the newest commits.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    generation: int
    commits: Commits


class LayerPayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer in the form of `LayerState`: of the cut or checkpoint that was asked for, or to fill a replica."""

    tensors: tuple[str, ...]  # the names of the frame's
    scalars: dict[str, int | float | bool | None]
    names: dict[str, str]
    common: CommonState
    checkpoint: CheckpointId | None = None
    filling: ReplicaStart | None = None


class PayloadForm(NamedTuple):
    """The form of a kind's frames."""

    payload: Any  # its type
    fewest: int = 0
    most: float = 0
    flat: bool = False  # the tensors are pieces of a stage's gradient


FORMS: Final = {
    FrameKind.ACTIVATION: PayloadForm(FrameFacts | None, 1, torch.inf),
    FrameKind.GRADIENT: PayloadForm(FrameFacts | None, 0, torch.inf),  # integers have none
    FrameKind.CONTRIBUTION: PayloadForm(FrameFacts | None, 1, torch.inf, flat=True),
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
    """Return the frame with its payload parsed as its kind's type. Raises RefusedFrame."""
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
