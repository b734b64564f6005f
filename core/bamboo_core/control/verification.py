"""Messages about results that have to be the same; see docs/design/verify.md."""

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from bamboo_core.control.guard import Sum
from bamboo_core.control.message import Count, Message
from bamboo_core.planning.plan import Cell, WorkerId

MOST_QUESTIONS = 16
_IN_WORDS = {"Forward": "forward", "LossGradient": "gradient of the loss", "Backward": "backward"}


# worker -> coordinator


class Result(StrEnum):
    """What a cell computes in a step that its shadow computes, too."""

    FORWARD = (
        "Forward"  # of a microbatch: what the stage gives; of the last one what its last layer gives, and the loss
    )
    LOSS_GRADIENT = "LossGradient"  # of a microbatch: what the loss sends back to the last layer
    BACKWARD = "Backward"  # of a microbatch: the gradients of the stage's inputs
    GRADIENT = "Gradient"  # of all of the cell's microbatches: the sum of the gradients of its parameters


class ForwardPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which forward, or which of what followed from it."""

    kind: ClassVar[str] = "forward"

    cell: Cell
    step: Count  # so many were committed before it
    microbatch: Count
    device: Count = 0  # on which of the worker's devices, if it has several
    result: Result = Result.FORWARD

    @property
    def stage(self) -> int:
        return self.cell.stage

    @property
    def last_good(self) -> int:
        """The newest version of states that it has no part in: the one that its step begins with."""
        return self.step

    def __str__(self) -> str:
        (d, s), step, microbatch = self.cell, self.step + 1, self.microbatch
        if self.result is Result.GRADIENT:
            return f"the gradient in step {step} of stage {s} of pipeline {d}"
        what = _IN_WORDS[self.result.value]
        return f"the {what} of microbatch {microbatch} in step {step} on stage {s} of pipeline {d}"


class ForwardDiffers(Message, frozen=True):
    """A cell's shadow says that it came to another sum than the owner."""

    place: ForwardPlace
    owner: WorkerId
    theirs: Sum
    mine: Sum
    again: Sum | None = None  # the shadow's sum from a second try; None if what that takes is gone


class ForwardSum(Message, frozen=True):
    """The answer to LookAgain, of the cell's owner or its shadow."""

    place: ForwardPlace
    sum: Sum


# coordinator -> worker


class LookAgain(Message, frozen=True):
    """Say what these forwards come to when they are run; earlier questions are withdrawn."""

    places: Annotated[tuple[ForwardPlace, ...], msgspec.Meta(max_length=MOST_QUESTIONS)]
