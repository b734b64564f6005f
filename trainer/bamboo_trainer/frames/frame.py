"""What travels on the data plane: frames, addressed by what they are and not by who sent them."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import torch

from bamboo_core.planning.plan import Cell


class FrameKind(IntEnum):
    """The kinds of frames. Those from ANNOUNCE to LAYERS_WANTED, READY, COMMIT, LAYERS_LACKED, HISTORY,
    KEPT_ALL, EVALUATIONS, REPEAT and SUMMED carry no tensors.
    """

    ACTIVATION = 1  # outputs of a stage's forward, to the next stage's cell; part = EVALUATED of an evaluation's batch
    GRADIENT = 2  # gradients of a stage's inputs, to the previous stage's cell
    CONTRIBUTION = 3  # one pipeline's share of a stage's gradients; part = source pipeline; payload: to its buffers
    RESULT = 4  # a reduced chunk of a stage's gradients; part = chunk
    TIED = 5  # gradients of tied parameters; part = source stage
    READY = 6  # a cell has finished the step; to the root; part = number of the cell; payload: cell, norm, losses
    COMMIT = 7  # the root's word: apply the optimizer step; payload: norm, loss, microbatches, generation, epoch
    SYNC = 8  # a stage's final gradients and running buffers, to its replicas; payload: the newest commits
    STATE = 9  # a stage's whole state, to a replica that has none; payload: what it is, the newest commits
    ANNOUNCE = 10  # a replica tells its owner which version it holds; payload: version, secured, digest
    HEARD = 11  # to the root: the newest commits that this worker knows; payload: a list of (step, commit)
    ASK = 12  # to everybody: I repeat a committed step of this cell; give me what came out of it, or what it takes
    LOGGED = 13  # the answer's end: no more boundary frames; payload: the first step in our log, by own cell
    LOGGED_BULK = 14  # the same on the link of the large frames
    LOGGED_STATE = 15  # the same on the link of the states
    LAYERS_WANTED = 16  # to a holder of a cut's or a checkpoint's state; payload: of which, which layers
    LAYER = 17  # a layer of it; part = layer; payload: of which state, and what the layer's has beside tensors
    LAYERS_LACKED = 18  # the answer for those that are not here; payload: as of the question
    HISTORY = 19  # to the root, or by it: steps not known to be in the job's history; payload: a list
    PARTIAL_SUM = 20  # of a portion of a cell, to its owner; microbatch, part = first, end; payload: losses, metrics
    SPOT_CHECK = 21  # what a microbatch of a cell took in, for who computes it again; payload: what it came to
    KEPT_SUM = 22  # of finished groups of a cell, to its keeper, and from it to a new owner; otherwise as PARTIAL_SUM
    KEPT_ALL = 23  # from the keeper to a new owner, behind these: there are no more
    EVALUATIONS = 24  # to the root, or by it: the evaluations that this worker knows; payload: metrics, by state
    REPEAT = 25  # to a cell's runners: a stage beside it, part, lacks its frames from this microbatch of the step on
    SUMMED = 26  # from a cell's owner to a runner: the sum of these microbatches is here; microbatch, part = first, end


EVALUATED = 1  # the part of an activation

BOUNDARY = frozenset({FrameKind.ACTIVATION, FrameKind.GRADIENT})  # what crosses the boundaries of stages
BULK = frozenset(
    {
        FrameKind.SYNC,
        FrameKind.CONTRIBUTION,
        FrameKind.RESULT,
        FrameKind.TIED,
        FrameKind.LOGGED_BULK,
        FrameKind.LAYER,
        FrameKind.PARTIAL_SUM,
        FrameKind.KEPT_SUM,
        FrameKind.KEPT_ALL,
        FrameKind.SPOT_CHECK,
    }
)
REDUCED = frozenset({FrameKind.CONTRIBUTION, FrameKind.RESULT})  # microbatch = bucket of the stage's gradients
STATES = frozenset({FrameKind.STATE, FrameKind.LOGGED_STATE})
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
    """Is it for whoever runs that microbatch of a cell in the step? All else is for the cell's owner."""
    return address.kind in BOUNDARY and address.part != EVALUATED


class Again(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a frame that has no other and has been sent before."""

    again: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message between workers."""

    address: Address
    epoch: int  # the sender's
    origin: int = 1  # in which the states began that it belongs to
    tensors: tuple[torch.Tensor, ...] = ()
    payload: Any = None  # small facts, of each kind its own (`payloads`)

    @property
    def again(self) -> bool:
        """Has it been sent before?"""
        return getattr(self.payload, "again", False) is True
