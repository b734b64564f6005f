"""The work on a cell's step so far: contexts for backwards, and the gradients and results that workers send."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bamboo_core.planning.cell_portions import Range
from bamboo_core.planning.gradient_groups import SumNode
from bamboo_trainer.frames import Frame, PartialSum
from bamboo_trainer.stage.forwarding import Forwarding, Metrics
from bamboo_trainer.stage.gradients import GradientSum, WeightGradients
from bamboo_trainer.stage.parameters import BackwardPart, Cut, Ends, NormSums
from bamboo_trainer.task import Parts, Sum
from bamboo_trainer.tasks.task_errors import TaskError

Gradients = tuple[Tensor | None, ...]  # None where the loss does not depend on an output, or it needs none


class BackwardScale(NamedTuple):
    """The gradients with which a backward begins, instead of 1: `mean` for a mean loss, `total` for a summed one."""

    mean: float = 1.0
    total: float = 1.0

    def of(self, weight: float | None) -> float:
        """Return the initial gradient for a loss. weight: that of a summed loss; None for a mean loss."""
        return self.mean if weight is None else self.total


class Unread(NamedTuple):
    """Results of a forward that are not read from the device yet. added: names of the losses that layers added.
    values: these losses, followed by a last stage's loss.
    """

    added: tuple[str, ...]
    values: Parts


def edge_of(output: Tensor) -> GradientEdge | None:
    """Return the graph edge where an output's backward begins; None if the output requires no gradient."""
    return get_gradient_edge(output) if output.requires_grad else None


@dataclass(slots=True, eq=False)
class Work:
    """A cell's work on a step: the gradient so far, contexts for backwards, and results of forwards."""

    gradients: GradientSum
    # by microbatch: its inputs, and where its backward begins: a last stage's loss, else the outputs that are floats
    contexts: dict[int, tuple[Parts, tuple[Tensor | GradientEdge | None, ...]]] = field(default_factory=dict)
    bucketwise: int | None = None  # the last microbatch, if its backward runs bucket by bucket
    cuts: dict[int, list[Cut]] = field(default_factory=dict)  # microbatch -> where its backward is divided
    parts: Iterator[BackwardPart] | None = None  # the remaining parts of the `bucketwise` backward
    postponed: dict[int, WeightGradients] = field(default_factory=dict)  # microbatch -> what its backward has postponed
    unread: dict[int, Unread] = field(default_factory=dict)  # microbatch -> for `losses`, `added_values`
    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)  # of the losses, if these are sums
    metrics: dict[int, Metrics] = field(default_factory=dict)
    added: dict[int, list[Tensor]] = field(default_factory=dict)  # losses of layers, with their graphs
    added_values: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    statistics: dict[int, NormSums] = field(default_factory=dict)  # microbatch -> norms' sums, for its gradient
    evaluated: dict[int, dict[str, Sum]] = field(default_factory=dict)  # of a last stage: by batch and metric

    def complete(self, forwarding: Forwarding, *, last: bool) -> None:
        """Keep a forward's results for the backward and the step's report. last: if so, the one output is the loss.

        Raises TaskError if this work's losses are means for some microbatches and sums for others.
        """
        m, added = forwarding.microbatch, forwarding.capture.losses
        outputs = [part for part in forwarding.parts if part.is_floating_point()]
        self.contexts[m] = (forwarding.leaves, tuple(outputs if last else map(edge_of, outputs)))
        if forwarding.cuts:
            self.cuts[m] = forwarding.cuts
        if added:
            self.added[m] = [value for _, value in added]
        if added or last:
            losses = [value for _, value in added] + [forwarding.parts[0]] * last
            self.unread[m] = Unread(tuple(name for name, _ in added), tuple(value.detach() for value in losses))
        if not last:
            return
        weights, others = self.weights.keys() - {m}, (self.losses.keys() | self.unread.keys()) - {m}
        if others and bool(weights) != (forwarding.weight is not None):
            raise TaskError("the loss is Weighted for some microbatches and a mean for others, expected one of the two")
        self.metrics[m] = forwarding.metrics
        if forwarding.weight is not None:
            self.weights[m] = forwarding.weight

    def figures(self) -> Parts:
        """Return the losses not read from the device yet (`unread`), as scalars on the stage's device."""
        return tuple(value for one in self.unread.values() for value in one.values)

    def read(self, scalars: Sequence[Tensor]) -> None:
        """Record the values of `figures`. scalars: these tensors, or copies in host memory, which need no wait."""
        values = iter([float(value) for value in scalars])
        for m, one in self.unread.items():
            if one.added:
                self.added_values[m] = [(name, next(values)) for name in one.added]
            if len(one.values) > len(one.added):
                self.losses[m] = next(values)
        self.unread = {}

    def received(self, frame: Frame | None) -> Gradients | None:
        """Return the gradients in the next stage's frame; None without a frame. Keep the loss's weight, if any."""
        if frame is not None and frame.payload is not None and frame.payload.weight is not None:
            self.weights[frame.address.microbatch] = frame.payload.weight
        return frame.gradients if frame else None

    def ends(
        self, microbatch: int, gradients: Gradients | None, microbatches: int, scale: BackwardScale
    ) -> tuple[Parts, Ends]:
        """Remove a forward's context; return its inputs, and the tensors or edges where its backward begins (`Ends`).

        gradients: see `Stage.backward`; their number must fit, else ValueError. microbatches: number in the step.
        """
        leaves, outputs = self.contexts.pop(microbatch)
        added = self.added.pop(microbatch, [])
        if gradients is None:
            (loss,) = outputs
            assert isinstance(loss, Tensor)
            return leaves, self._ends(microbatch, loss, added, microbatches, scale)
        pairs = [(end, g) for end, g in zip(outputs, gradients, strict=True) if not (end is None or g is None)]
        return leaves, [*pairs, *self._ends_of_added(microbatch, added, microbatches, scale)]

    def _ends(
        self, microbatch: int, loss: Tensor, added: Sequence[Tensor], microbatches: int, scale: BackwardScale
    ) -> Ends:
        """Return where a last stage's backward begins: the loss, and the losses that layers add."""
        weight = self.weights.get(microbatch)
        total = loss / microbatches if weight is None else loss
        own = (total, torch.full_like(loss, scale.of(weight)))
        return [own, *self._ends_of_added(microbatch, added, microbatches, scale)]

    def _ends_of_added(
        self, microbatch: int, added: Sequence[Tensor], microbatches: int, scale: BackwardScale
    ) -> Iterator[tuple[Tensor, Tensor]]:
        weight = self.weights.get(microbatch)
        counted = scale.of(weight) * (1 / microbatches if weight is None else weight)
        return ((value, torch.full_like(value, counted)) for value in added)


T = TypeVar("T")


def packed_work(work: Work, microbatches: Range, nodes: Sequence[tuple[SumNode, Tensor]]) -> tuple[PartialSum, Parts]:
    """Return a frame's payload and tensors with the results of a half-open range of finished microbatches. nodes: nodes
    of the summation tree that cover their gradients, each with its sum; the sums become the tensors.
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


def resume(work: Work, microbatches: Range, payload: PartialSum, tensors: Parts) -> None:
    """Add the results of a half-open range of microbatches (`packed_work`); the work continues after this range."""
    work.gradients.resume(microbatches, tensors)
    work.losses |= payload.losses
    work.weights |= payload.weights
    work.metrics |= payload.metrics
    work.added_values |= payload.added
