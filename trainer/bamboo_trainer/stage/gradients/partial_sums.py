"""A worker's results for some of a cell's microbatches, packed for another worker, which adds them to its work."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from bamboo_core.planning.gradient_groups import SumNode
from bamboo_core.planning.portions import Range
from bamboo_trainer.frames.payloads import PartialSum
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts

T = TypeVar("T")


def packed_work(work: Work, microbatches: Range, nodes: Sequence[tuple[SumNode, Tensor]]) -> tuple[PartialSum, Parts]:
    """Return a frame's payload and tensors for finished microbatches, half-open: the sums of their groups, which are
    these nodes of the tree.
    """
    work.read(work.figures())
    payload = PartialSum(
        losses=_of(work.losses, microbatches),
        weights=_of(work.weights, microbatches),
        metrics=_of(work.metrics, microbatches),
        added=_of(work.added_values, microbatches),
    )
    return payload, tuple(total for _, total in nodes)


def _of(by_microbatch: Mapping[int, T], microbatches: Range) -> dict[int, T]:
    first, end = microbatches
    return {m: one for m, one in by_microbatch.items() if first <= m < end}


def add_to(work: Work, microbatches: Range, payload: PartialSum, tensors: Parts) -> None:
    """Add what `packed_work` has packed of these microbatches, half-open, to this work."""
    work.gradients.receive(microbatches, tensors)
    _note(work, payload)


def resume(work: Work, microbatches: Range, payload: PartialSum, tensors: Parts) -> None:
    """Make this work, not begun yet, continue after these microbatches, half-open, packed by `packed_work`."""
    work.gradients.resume(microbatches, tensors)
    _note(work, payload)


def _note(work: Work, payload: PartialSum) -> None:
    work.losses |= payload.losses
    work.weights |= payload.weights
    work.metrics |= payload.metrics
    work.added_values |= payload.added
