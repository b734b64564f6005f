"""The work on one stage of the model: forwards, backwards and weight gradients of its microbatches.

Knows no peers, no schedule, no clock. Every result is a pure function of (task, seed, version, step, microbatch): an
owner, its shadow and a later replay get the same bits.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from bamboo_core.control.protocol import LOSS_SCALE, MOST_METRICS
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.memory.marks import QueueMark
from bamboo_trainer.memory.placement import wait_for
from bamboo_trainer.stage.as_built import AsBuilt
from bamboo_trainer.stage.evaluation import Evaluator
from bamboo_trainer.stage.first_look import FirstLook
from bamboo_trainer.stage.forwarding import Forwarding, ForwardRunner, split_needs, with_needs
from bamboo_trainer.stage.gradients.backwards import BackwardRunner
from bamboo_trainer.stage.gradients.gradient_sum import GradientSum
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.stage.work import BackwardScale, Work
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.user_code import named_layer
from bamboo_trainer.training import TrainingConfig, loss_unit

_UNSCALED: Final = BackwardScale()


class Stage:
    """What is computed on a stage's `values`, which no forward and no backward changes.

    The boundary contract: outputs are all parts, and which of them need a gradient if not all do (`with_needs`);
    gradients are those of the floating-point parts only, in order (integer parts have none). A part that needs none, or
    that the loss does not depend on, has NO_GRADIENT: zeros would reach the parameters behind it. Saved contexts keep
    the inputs they were given (no copy): reuse a pooled buffer only after the microbatch's backward.

    has_run: whether a forward was run. as_built: what its modules have noted since they were built; None of compiled
    ones, whose code is for their attributes.
    """

    def __init__(
        self,
        values: StageValues,
        reader: BatchReader | None = None,
        copies: HostCopies | None = None,
        first: Callable[[], Task] | None = None,
    ) -> None:
        """reader: of the task's data. copies: bring what is received to the device of the values. first: the task with
        the values that training begins with, if that of the values has others.
        """
        task, config, device = values.task, values.config, values.device
        layers, parameters = values.layers, values.parameters
        self.values, self._config = values, config
        self._reader = reader or BatchReader(task, config.samples)
        self._copies = copies or AtOnce(device)
        self._marks_inputs = False
        self._entry: QueueMark | None = None
        self._weight_unit = loss_unit(task, config)
        load = partial(self._reader.batch, values.index)
        self._forwards = ForwardRunner(task, config, layers, parameters, device, load, self.bring)
        self.compile_seconds = self._forwards.compile_seconds
        self._backwards = BackwardRunner(
            layers, parameters, self.bring, config.microbatches, splits=not self._forwards.repeats
        )
        self._first_look = FirstLook(first or (lambda: task), config, layers, parameters, values.shared, values.last)
        self._evaluator = Evaluator(task, config, layers, device, values.last)
        self.has_run = False
        self.as_built = None if config.compile else AsBuilt(layers)

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int], *, bucketwise: bool = False) -> Work:
        """Work on a step's microbatches, whole groups of those that the bounds say. bucketwise: the last one's backward
        begins with one bucket, and `backward_rest` goes on with the others.
        """
        self._forwards.expect(self.values.version, microbatches)
        final = self.values.final
        total = GradientSum(final.gradient_size, self.values.device, bounds, microbatches, final.buckets)
        return Work(total, bucketwise=microbatches[-1] if bucketwise else None)

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Detached outputs, or () on the last stage. `inputs` is None on stage 0, which loads the data.

        Repeating it for a microbatch gives the same bits and replaces the saved context.
        """
        if not self.has_run and self.values.version == 0:
            self.look(step, microbatch, inputs)
        return self._forward(work, step, microbatch, inputs)

    def look(self, step: int, microbatch: int, inputs: Parts | None) -> None:
        """Before the first forward of all: is what the task does deterministic? Raises NotDeterministic."""
        if not self._config.deterministic:
            return
        given, place = None if inputs is None else split_needs(inputs)[0], (self.values.index, step, microbatch)
        self._first_look.before(self._reader, place, given, self.values.device, self._forwards.call)

    def _forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        place = (step, microbatch, inputs, microbatch == work.bucketwise)
        if self.has_run:
            return self.complete(work, self._run(*place))
        found = self._first_look.during(partial(self._run, *place))
        self.has_run = True
        return self.complete(work, found)

    def _run(self, step: int, microbatch: int, inputs: Parts | None, bucketwise: bool) -> Forwarding:
        forwarding = self._forwards.start(step, microbatch, inputs)
        forwarding.cuts = [] if bucketwise else None
        self._forwards.run(forwarding, self.values.end)
        return forwarding

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> Forwarding:
        """A forward that is run layer by layer with `advance` and ended with `complete`: the same bits as `forward`."""
        return self._forwards.start(step, microbatch, inputs)

    def advance(self, forwarding: Forwarding) -> None:
        """Run one more layer; after the last one of the model, the loss."""
        self._forwards.advance(forwarding)

    def complete(self, work: Work, forwarding: Forwarding) -> Parts:
        """Keep for the backward what a finished forward left; the detached outputs, or () on the last stage.

        They are sent and logged, so they must stay as they are when an optimizer step writes to the parameters.
        """
        assert forwarding.done
        work.contributions[forwarding.microbatch] = self.values.running.record(forwarding.capture.contributed)
        work.complete(forwarding, last=self.values.last)
        if self.values.last:
            scale, metrics = self.values.optimizer.loss_scale, work.metrics[forwarding.microbatch]
            if scale and len(metrics) < MOST_METRICS:
                work.metrics[forwarding.microbatch] = metrics | {LOSS_SCALE: (scale.scale, 1.0)}
            return ()
        outputs = [p.detach() for p in forwarding.parts]
        kept = tuple([p.clone() if self.values.parameters.holds(p) else p for p in outputs])
        return with_needs(kept, [p.requires_grad for p in forwarding.parts])

    @property
    def runs_ahead(self) -> bool:
        """Does the device go on by itself with what was started?"""
        return self.values.device.type != "cpu"

    def wait(self) -> None:
        """Until what was started on the device is done."""
        wait_for(self.values.device)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        """What was received, on the device."""
        brought = self._copies.bring(tensors)
        if self._marks_inputs:
            self._marks_inputs, self._entry = False, self.mark()
        return brought

    def mark(self) -> QueueMark:
        """A mark behind what the device has been given to do."""
        return self._copies.mark()

    def mark_inputs(self) -> None:
        """Put a mark behind the next inputs that are brought to the device: what follows is no wait for them."""
        self._marks_inputs, self._entry = True, None

    def take_entry(self) -> QueueMark | None:
        """That mark; None if nothing was brought."""
        found, self._marks_inputs, self._entry = self._entry, False, None
        return found

    def expect(self, coming: Iterable[tuple[int, int]]) -> None:
        """These steps' microbatches are the next ones to be run forward: their data are read in the background."""
        if self.values.index == 0 or self.values.last:
            self._reader.expect(self.values.index, coming)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """A forward and a backward for nothing but to have them run once. The outputs, as of `forward`."""
        work = self.begin([microbatch], [microbatch, microbatch + 1])
        outputs = self._forward(work, step, microbatch, inputs)
        zeros = tuple(torch.zeros_like(p) for p in split_needs(outputs)[0] if p.is_floating_point())
        self.backward(work, step, microbatch, None if self.values.last else zeros)
        return outputs

    def named_layer(self, layer: int) -> str:
        """In a sentence."""
        return named_layer(self.values.layers[layer], layer)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Parts | None, *, postpone: bool = False
    ) -> Parts:
        """Adds to the sum of gradients; returns the gradients of the floating-point inputs, () on stage 0.

        `gradients` belong to the floating-point outputs, and behind them is the weight of the microbatch's loss if that
        is a sum; None on the last stage, which starts from loss / microbatches, or from a sum. The saved context is
        used up. What is returned ends with the weight as well.

        postpone: leave what only the sum needs to `weight_gradients`, as far as that can be told apart.
        """
        assert (gradients is None) == self.values.last
        scale = self._backward_scale()
        return self._backwards.run(work, (step, microbatch), gradients, scale, postpone=postpone)

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        """Run the next part of a backward that goes bucket by bucket; nothing if the forward was not run so."""
        self._backwards.next_part(work, (step, microbatch))

    def weight_gradients(self, work: Work, step: int, microbatch: int) -> None:
        """Adds to the sum of gradients what a backward has postponed: nothing if that was nothing. In order."""
        self._backwards.weights(work, step, microbatch)

    def _backward_scale(self) -> BackwardScale:
        scale = self.values.optimizer.loss_scale
        return BackwardScale(scale.scale, scale.scale / self._weight_unit) if scale else _UNSCALED

    def evaluate(self, work: Work, batch: int, inputs: Parts | None) -> Parts:
        """A forward of a batch of the evaluation's data, in eval mode: outputs, or () on the last stage."""
        outputs, found = self._evaluator.run(self.values.version, batch, inputs, self._reader)
        if self.values.last:
            work.evaluated[batch] = found
        return tuple(p.clone() if self.values.parameters.holds(p) else p for p in outputs)


def build_stage(
    task: Task,
    index: int,
    stages: Sequence[tuple[int, int]],
    config: TrainingConfig,
    device: torch.device | str = "cpu",
    reader: BatchReader | None = None,
    copies: HostCopies | None = None,
    first: Callable[[], Task] | None = None,
) -> Stage:
    """A stage with the values before the first step. stages: as of `StageValues`; first: as of `Stage`."""
    values = StageValues(task, index, stages, config, device, copies)
    return Stage(values, reader, copies, first)
