"""The computations of one stage: forwards, backwards and weight gradients of its microbatches, and evaluations.

A `Stage` knows no peers and no schedule. In a job with `training.deterministic`, an owner, its shadow and a later
repetition must get the same bits from the same state, step, microbatch and received tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from bamboo_core.control.protocol import LOSS_SCALE, MOST_METRICS
from bamboo_trainer.memory.gpus import QueueMark, wait_for
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.stage.as_built import AsBuilt
from bamboo_trainer.stage.backward import BackwardRunner
from bamboo_trainer.stage.forwarding import Evaluator, Forwarding, ForwardRunner
from bamboo_trainer.stage.gradients import GradientSum
from bamboo_trainer.stage.parameters import norm_sums
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import Gradients, Work
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import HAVE_IT, stranger
from bamboo_trainer.tasks.user_code import named_layer, no_new_parameters, unchanged_buffers
from bamboo_trainer.training import TrainingConfig


class Stage:
    """The forwards, backwards and evaluations of one stage, which leave the state in `values` unchanged.

    Outputs are all tensors of the last layer's result; the last stage returns none. Outputs of `forward` are detached,
    but keep `requires_grad`. Gradients belong to the floating-point tensors only, in order: None for a tensor that
    needs none, or on which the loss does not depend, since zeros would mark the parameters before it as used. Until all
    gradients of a microbatch are computed, do not write to its inputs: saved contexts may hold them without a copy.

    has_run: `checked` has run a forward. as_built: the modules' plain attributes as built; None if the job compiles
    layers, since compiled code is specialized on these attributes.
    """

    def __init__(
        self,
        values: StageValues,
        reader: BatchReader | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        """Create the stage. reader: reads the task's data. copies: bring received tensors to the values' device."""
        self.values = values
        self._reader = reader or BatchReader(values.task, values.config.samples)
        self._copies = copies or AtOnce(values.device)
        self._marks_inputs = False
        self._entry: QueueMark | None = None
        self._forwards = ForwardRunner(values, self._reader, self.bring)
        self.compile_seconds = self._forwards.compile_seconds
        self._backwards = BackwardRunner(values, self.bring, splits=not self._forwards.repeats)
        self._evaluator = Evaluator(values, self._reader)
        self.has_run = False
        self.as_built = None if values.config.compile else AsBuilt(values.layers)

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int], *, bucketwise: bool = False) -> Work:
        """Return new, empty work on a step's microbatches. bounds: see `GradientSum`. bucketwise: if there are several
        buckets, `forward` cuts the last microbatch; its `backward` runs a first part, each `backward_rest` the next.
        """
        self._forwards.expect(self.values.version, microbatches)
        values = self.values
        total = GradientSum(values.gradient_size, values.device, bounds, microbatches, values.buckets)
        return Work(total, bucketwise=microbatches[-1] if bucketwise else None)

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Run a forward; return detached outputs, or () on the last stage. inputs: None on stage 0, which loads data.

        A repetition for the same microbatch replaces the saved context.
        """
        return self.complete(
            work, self.checked(partial(self._run, step, microbatch, inputs, microbatch == work.bucketwise))
        )

    def checked(self, run: Callable[[], Forwarding]) -> Forwarding:
        """Run a forward. Raises TaskError if the first one changes buffers, makes parameters or uses foreign ones."""
        if self.has_run:
            return run()
        layers = self.values.layers
        with no_new_parameters(layers), unchanged_buffers(layers):
            forwarding = run()
        self.has_run = True
        ends = (*forwarding.parts, *(value for _, value in forwarding.capture.losses))
        foreign = stranger(ends, self.values.parameters.trained())
        if foreign is not None:
            raise TaskError(
                f"layers {min(layers)} to {max(layers)}{' or the loss' if self.values.last else ''} use a parameter "
                f"{list(foreign.shape)} that none of these layers has (Module.named_parameters), so it would not be "
                f"trained with it: {HAVE_IT}"
            )
        return forwarding

    def _run(self, step: int, microbatch: int, inputs: Parts | None, bucketwise: bool) -> Forwarding:
        forwarding = self._forwards.start(step, microbatch, inputs)
        forwarding.cuts = [] if bucketwise else None
        self._forwards.run(forwarding, self.values.end)
        return forwarding

    def start(self, step: int, microbatch: int, inputs: Parts | None) -> Forwarding:
        """Start a forward that `advance` runs layer by layer and `complete` ends: the same bits as `forward`."""
        return self._forwards.start(step, microbatch, inputs)

    def advance(self, forwarding: Forwarding) -> None:
        """Run the next layer. After the model's last layer, compute the loss and the metrics, too."""
        self._forwards.advance(forwarding)

    def complete(self, work: Work, forwarding: Forwarding) -> Parts:
        """Keep a finished forward for the backward; return the detached outputs, or () on the last stage.

        Outputs in the memory of a parameter or buffer are copied, as no update may change sent or logged tensors.
        """
        assert forwarding.done
        if captured := forwarding.capture.contributed:
            following = self.values.config.microbatches - 1 - forwarding.microbatch
            work.statistics[forwarding.microbatch] = norm_sums(self.values.parameters.norms, captured, following)
        work.complete(forwarding, last=self.values.last)
        if self.values.last:
            scale, metrics = self.values.common.loss_scale, work.metrics[forwarding.microbatch]
            if scale and len(metrics) < MOST_METRICS:
                work.metrics[forwarding.microbatch] = metrics | {LOSS_SCALE: (scale.scale, 1.0)}
            return ()
        pairs = [(p.requires_grad, p.detach()) for p in forwarding.parts]
        holds = self.values.parameters.holds
        return tuple([(p.clone() if holds(p) else p).requires_grad_(need) for need, p in pairs])

    def draws(self) -> dict[int, Draws]:
        """Return an empty `Draws` for each layer, to record the random number generators that its forwards use."""
        return {layer: Draws(self._reader.quiet) for layer in self.values.layers}

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works asynchronously."""
        return self.values.device.type != "cpu"

    def wait(self) -> None:
        """Wait until the device's computing stream has done the work started so far."""
        wait_for(self.values.device)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        """Return received tensors, copied to the device if they are elsewhere."""
        brought = self._copies.bring(tensors)
        if self._marks_inputs:
            self._marks_inputs, self._entry = False, self.mark()
        return brought

    def mark(self) -> QueueMark:
        """Return a mark behind the work queued on the device."""
        return self._copies.mark()

    def mark_inputs(self) -> None:
        """Let the next `bring` put a mark behind its tensors: times measured from there include no wait for them."""
        self._marks_inputs, self._entry = True, None

    def take_entry(self) -> QueueMark | None:
        """Return and forget the mark that `mark_inputs` has requested; None if nothing was brought since."""
        entry, self._marks_inputs, self._entry = self._entry, False, None
        return entry

    def expect(self, coming: Iterable[tuple[int, int]]) -> None:
        """Let the reader prefetch for coming forwards if this stage reads data. coming: (step, microbatch) in order."""
        if self.values.index == 0 or self.values.last:
            self._reader.expect(self.values.index, coming)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Run a forward and a backward without using the gradients. Return the outputs, as `forward` does."""
        work = self.begin([microbatch], [microbatch, microbatch + 1])
        outputs = self.forward(work, step, microbatch, inputs)
        zeros = tuple(torch.zeros_like(p) for p in outputs if p.is_floating_point())
        self.backward(work, step, microbatch, None if self.values.last else zeros)
        return outputs

    def named_layer(self, layer: int) -> str:
        """Return a layer's name for messages."""
        return named_layer(self.values.layers[layer], layer)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Gradients | None, *, postpone: bool = False
    ) -> Gradients:
        """Run a backward or, if bucketwise, its first part; use up the saved context. Add the parameters' gradients to
        their sum unless postponed; return the gradients of the floating-point inputs, () on stage 0.

        gradients: of the floating-point outputs; None on the last stage, which starts from its loss. postpone: leave
        the weight gradients to `weight_gradients`, if they can be separated.
        """
        assert (gradients is None) == self.values.last
        return self._backwards.run(work, step, microbatch, gradients, postpone=postpone)

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        """Run the next part of a bucketwise backward (see `begin`); do nothing if no part is left."""
        self._backwards.next_part(work, step, microbatch)

    def weight_gradients(self, work: Work, step: int, microbatch: int) -> None:
        """Compute and add the weight gradients that backwards up to this microbatch have postponed, if any."""
        self._backwards.weights(work, step, microbatch)

    def evaluate(self, work: Work, batch: int, inputs: Parts | None) -> Parts:
        """Run an evaluation batch in eval mode; return outputs, or () on the last stage, where `work` gets the sums."""
        outputs, sums = self._evaluator.run(batch, inputs)
        if self.values.last:
            work.evaluated[batch] = sums
        return tuple(p.clone() if self.values.parameters.holds(p) else p for p in outputs)


def build_stage(
    task: Task,
    index: int,
    stages: Sequence[tuple[int, int]],
    config: TrainingConfig,
    device: torch.device | str = "cpu",
    reader: BatchReader | None = None,
    copies: HostCopies | None = None,
) -> Stage:
    """Build a stage with the values before the first step. stages: see `StageValues`."""
    values = StageValues(task, index, stages, config, device, copies)
    return Stage(values, reader, copies)
