"""Frames, the messages of the data plane, addressed by their content and not by their sender."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import torch

from bamboo_core.planning.plan import Cell


class FrameKind(IntEnum):
    """The kinds of frames. Those from ANNOUNCE to LAYERS_WANTED, READY, COMMIT, LAYERS_LACKED, HISTORY, KEPT_ALL,
    EVALUATIONS, REPEAT and SUMMED carry no tensors.
    """

    ACTIVATION = 1  # outputs of a stage's forward, to the next stage's cell; part = EVALUATED of an evaluation's batch
    GRADIENT = 2  # gradients of a stage's inputs, to the previous stage's cell
    CONTRIBUTION = 3  # one pipeline's share of a stage's gradients; part = source pipeline
    RESULT = 4  # a reduced chunk of a stage's gradients; part = chunk
    TIED = 5  # gradients of tied parameters; part = source stage
    READY = 6  # a cell has finished the step; to the root; part = number of the cell; payload: cell, norm, losses
    COMMIT = 7  # from the root: apply the optimizer step; payload: norm, loss, microbatches, generation, epoch
    SYNC = 8  # a stage's final gradients, to its replicas; payload: the newest commits
    ANNOUNCE = 10  # from a replica to its owner: the version that it holds; payload: version, secured, digest
    HEARD = 11  # to the root: the newest commits that this worker knows; payload: a list of (step, commit)
    ASK = 12  # to all: the sender repeats a committed step of this cell, and needs its results or inputs
    LOGGED = 13  # the answer's end: no more boundary frames; payload: the first step in the log, by own cell
    LOGGED_BULK = 14  # the same on the link of the large frames
    LOGGED_STATE = 15  # the same on the link of the states
    LAYERS_WANTED = 16  # to a holder of a cut's or a checkpoint's state; payload: of which, which layers
    LAYER = 17  # a layer's state, asked for or for a replica; part = layer; payload: its facts, and what it belongs to
    LAYERS_LACKED = 18  # the answer for layers that are not here; payload: like the question's
    HISTORY = 19  # to the root, or from it: commits not known to be in the job's history; payload: a list
    PARTIAL_SUM = 20  # of a portion of a cell, to its owner; microbatch, part = first, end; payload: losses, metrics
    SPOT_CHECK = 21  # the inputs of a cell's microbatch, for the worker that checks it; payload: the results
    KEPT_SUM = 22  # of finished groups of a cell, to its keeper, and from it to a new owner; otherwise like PARTIAL_SUM
    KEPT_ALL = 23  # from the keeper to a new owner, after these: there are no more
    EVALUATIONS = 24  # to the root, or from it: the evaluations that this worker knows; payload: metrics, by state
    REPEAT = 25  # to a cell's runners: a neighbouring stage, part, lacks its frames from this microbatch of the step on
    SUMMED = 26  # from a cell's owner to a runner: the sum of these microbatches is here; microbatch, part = first, end


EVALUATED = 1  # the part of an activation
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
    """Names a frame's content. pipeline and stage are those of the cell it is for."""

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
    """Return whether it is for the runner of a cell's microbatch in the step, and not for the cell's owner."""
    return address.kind in BOUNDARY and address.part != EVALUATED


class FrameFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The payload of a frame without another one."""

    # of each part of floats that crosses a boundary, whether it needs a gradient, or has one; empty: all do
    gradients: tuple[bool, ...] = ()
    weight: float | None = None  # of the microbatch's loss if that is a sum, with gradients
    again: bool = False  # the frame has been sent before

    @classmethod
    def of(cls, gradients: Iterable[bool], weight: float | None = None) -> "FrameFacts | None":
        """Return the facts of parts that cross a boundary; None if there is nothing to tell."""
        flags = tuple(gradients)
        return None if weight is None and all(flags) else cls(gradients=() if all(flags) else flags, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message between workers."""

    address: Address
    epoch: int  # the sender's
    origin: int = 1  # of the states that it belongs to
    tensors: tuple[torch.Tensor, ...] = ()
    payload: Any = None  # small facts, of each kind its own (`payloads`)

    @property
    def again(self) -> bool:
        """Whether it has been sent before."""
        return getattr(self.payload, "again", False) is True

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """An activation's parts; those for which a gradient goes back require one."""
        floats = [part for part in self.tensors if part.is_floating_point()]
        for part, need in zip(floats, (self.payload and self.payload.gradients) or repeat(True), strict=False):
            part.requires_grad_(need)
        return self.tensors

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Gradients that go back, with None for each missing one."""
        given, flags = iter(self.tensors), self.payload and self.payload.gradients
        return tuple([next(given) if one else None for one in flags]) if flags else self.tensors
