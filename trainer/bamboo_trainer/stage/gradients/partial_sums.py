"""What one worker has computed of some of a cell's microbatches, for another one: packed, and made part of its work."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from bamboo_core.planning.gradient_groups import SumNode
from bamboo_core.planning.portions import Range
from bamboo_trainer.frames.payloads import Contributed, PartialSum
from bamboo_trainer.stage.contributions import packed, unpacked
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts

T = TypeVar("T")


def packed_work(work: Work, microbatches: Range, nodes: Sequence[tuple[SumNode, Tensor]]) -> tuple[PartialSum, Parts]:
    """What a frame says of finished microbatches of a work, half-open, and its tensors: the sums of their groups, which
    are these nodes of the tree, then what was contributed.
    """
    work.read(work.figures())
    contributed, data = packed(_of(work.contributions, microbatches))
    payload = PartialSum(
        losses=_of(work.losses, microbatches),
        weights=_of(work.weights, microbatches),
        metrics=_of(work.metrics, microbatches),
        added=_of(work.added_values, microbatches),
        contributed=contributed.microbatches,
    )
    return payload, (*(total for _, total in nodes), *data)


def _of(by_microbatch: Mapping[int, T], microbatches: Range) -> dict[int, T]:
    first, end = microbatches
    return {m: one for m, one in by_microbatch.items() if first <= m < end}


def add_to(work: Work, microbatches: Range, payload: PartialSum, tensors: Parts) -> None:
    """What `packed_work` has made of these microbatches, half-open, is part of this work."""
    _note(work, payload, tensors[work.gradients.receive(microbatches, tensors) :])


def resume(work: Work, microbatches: Range, payload: PartialSum, tensors: Parts) -> None:
    """Let this work, which has not begun, go on behind these microbatches, of which `packed_work` has made that."""
    _note(work, payload, tensors[work.gradients.resume(microbatches, tensors) :])


def _note(work: Work, payload: PartialSum, data: Parts) -> None:
    work.losses |= payload.losses
    work.weights |= payload.weights
    work.metrics |= payload.metrics
    work.added_values |= payload.added
    work.contributions |= unpacked(Contributed(microbatches=payload.contributed), data)
