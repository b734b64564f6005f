"""Backwards of a stage: whole, in two parts with weight gradients postponed, or bucket by bucket."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_pre_hook

from bamboo_trainer.memory.host_copies import Bring
from bamboo_trainer.stage.gradients import GradientSum, split
from bamboo_trainer.stage.parameters import Ends, add_norm_sums, parts_of
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import BackwardScale, Gradients, Work, edge_of
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.task_errors import in_task
from bamboo_trainer.training import loss_unit

WATCHED: Final = 4  # the first backwards of a stage, watched for modules that run again


class BackwardRunner:
    """The runner of backwards. It sums the microbatches' gradients in order, even if some are computed later."""

    def __init__(self, values: StageValues, bring: Bring, *, splits: bool) -> None:
        """Create the runner.

        bring: copies gradients to the device. splits: weight gradients may be postponed; False if layers run again in
        the backward (activation checkpointing).
        """
        self._values, self._parameters, self._bring = values, values.parameters, bring
        self._weight_unit = loss_unit(values.task, values.config)
        self._splits, self._unwatched = splits, WATCHED
        self._modules = {id(module) for layer in values.layers.values() for module in layer.modules()}

    def run(self, work: Work, step: int, microbatch: int, gradients: Gradients | None, *, postpone: bool) -> Gradients:
        """Run a backward; see `Stage.backward`. postpone: compute weight gradients later, if that keeps their bits."""
        added, first = len(work.added.get(microbatch, ())), self._values.first == 0
        leaves, given = work.ends(microbatch, gradients, self._values.config.microbatches, self._scale())
        cuts = work.cuts.pop(microbatch, None)
        if cuts:
            assert first  # no stage waits for gradients of its inputs
            self._compute_all(work, step)
            self._bind(work.gradients)
            add_norm_sums(work.gradients.target, work.statistics.pop(microbatch, ()))  # the first bucket may have some
            work.parts = parts_of(given, added, cuts)
            self.next_part(work, step, microbatch)
            return ()
        pairs = self._reached(given)
        if pairs:
            with in_task(self._doing(step, microbatch)):
                if not (postpone and self._postponed(work, microbatch, pairs, leaves)):
                    self._compute_all(work, step)
                    backward = partial(torch.autograd.backward, [p for p, _ in pairs], [g for _, g in pairs])
                    self._add(work, microbatch, backward)
        if microbatch not in work.postponed:
            self._compute_all(work, step)
            if microbatch in work.statistics:  # of a stage in which nothing is trained
                self._add(work, microbatch, lambda: None)
            work.gradients.added(microbatch)
        if first:
            return ()
        inputs = tuple(p.grad for p in leaves if p.is_floating_point())
        if microbatch in work.postponed:
            for leaf in leaves:
                leaf.grad = None  # sent gradients must not stay as long as the graph
        return inputs

    def _scale(self) -> BackwardScale:
        scale = self._values.common.loss_scale
        return BackwardScale(scale.scale, scale.scale / self._weight_unit) if scale else BackwardScale()

    def next_part(self, work: Work, step: int, microbatch: int) -> None:
        """Run the next part of a backward that goes bucket by bucket, if any is left."""
        if work.parts is None:
            return
        part, parameters, total = next(work.parts), self._parameters, work.gradients
        pairs = self._reached(part.ends)
        if pairs:
            self._bind(total)
            with in_task(self._doing(step, microbatch)):
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
            parameters.mark(total.target, total.marked)
        if part.last:
            work.parts = None
            total.added(microbatch)

    def _reached(self, ends: Ends) -> list[tuple[GradientEdge, Tensor]]:
        """Return the graph edges where a backward begins, with gradients on the device; omit ends without a graph."""
        edges = [(end if isinstance(end, GradientEdge) else edge_of(end), g) for end, g in ends]
        reached = [(edge, g) for edge, g in edges if edge is not None]
        return list(zip([edge for edge, _ in reached], self._bring([g for _, g in reached]), strict=True))

    def _doing(self, step: int, microbatch: int) -> str:
        layers = f"layers {self._values.first} to {self._values.end - 1}"
        return f"the backward of {layers}, at step {step + 1}, microbatch {microbatch},"

    def _postponed(self, work: Work, microbatch: int, pairs: list[tuple[GradientEdge, Tensor]], leaves: Parts) -> bool:
        """Compute only the inputs' gradients, and postpone the rest; return False if that is impossible."""
        if not self._splits:
            return False
        with self._watched() if self._unwatched else nullcontext():
            rest = split(pairs, leaves)
        if rest is not None:
            work.postponed[microbatch] = rest
        return rest is not None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Stop splitting once a backward in this context runs a layer again: each part would run that layer again.

        The task names its checkpointed layers (`Task.checkpointed`), but a module may also checkpoint itself.
        """

        def seen(module: nn.Module, _: Any) -> None:
            if id(module) in self._modules:
                self._splits = False

        self._unwatched -= 1
        handle = register_module_forward_pre_hook(seen)
        try:
            yield
        finally:
            handle.remove()

    def weights(self, work: Work, step: int, microbatch: int) -> None:
        """Compute the postponed weight gradients of this and earlier microbatches, if any."""
        for earlier in [m for m in work.postponed if m <= microbatch]:
            rest = work.postponed.pop(earlier)
            with in_task(self._doing(step, earlier)):
                self._add(work, earlier, rest.compute)
            work.gradients.added(earlier)

    def _compute_all(self, work: Work, step: int) -> None:
        if work.postponed:
            self.weights(work, step, max(work.postponed))

    def _bind(self, total: GradientSum) -> None:
        """Make backwards add the parameters' gradients to the sum's target."""
        if not total.is_begun:
            self._parameters.unbind()  # from a finished sum, which may have to make room
        self._parameters.bind(total.target)

    def _add(self, work: Work, microbatch: int, compute: Callable[[], None]) -> None:
        """Run `compute` for a microbatch's parameter gradients; add them and the norms' statistics to the sum.

        For `GradientSum.half`, the gradients are computed separately first: a parameter may be reached more than once,
        and its gradients must be summed before they are added to the half.
        """
        parameters, total, statistics = self._parameters, work.gradients, work.statistics.pop(microbatch, ())
        half = total.half
        if half is None:
            self._bind(total)
            compute()
            parameters.mark(total.target, total.marked)
            add_norm_sums(total.target, statistics)
        else:
            places = parameters.release(half)
            compute()
            parameters.add_to(half, places)
            add_norm_sums(half, statistics)
