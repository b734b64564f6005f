"""One stage of the model at one version, and the arithmetic on it. Knows no peers, no schedule, no clock.

Every result is a pure function of (task, seed, version, step, microbatch): an owner, its shadow and a later
replay get the same bits.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bamboo.control.protocol import LOSS_SCALE, MOST_METRICS
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.memory.placement import apart_from_others, wait_for
from bamboo_trainer.memory.saved_tensors import ContextSize
from bamboo_trainer.stage.as_built import AsBuilt
from bamboo_trainer.stage.checksums import checksum
from bamboo_trainer.stage.constants import Constants
from bamboo_trainer.stage.contributions import Recorded, RunningBuffers
from bamboo_trainer.stage.evaluation import EvaluatedState, Evaluator
from bamboo_trainer.stage.first_look import FirstLook
from bamboo_trainer.stage.forwarding import Forwarding, ForwardRunner, split_needs, with_needs
from bamboo_trainer.stage.gradients.backwards import BackwardRunner
from bamboo_trainer.stage.gradients.gradient_sum import GradientSum
from bamboo_trainer.stage.state import layer_state, snapshot
from bamboo_trainer.stage.state.finite import FiniteState
from bamboo_trainer.stage.state.late_copies import LateCopies
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters, TiedSegment, tied_segments
from bamboo_trainer.stage.state.shared_values import SharedValues
from bamboo_trainer.stage.work import BackwardScale, Work
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.mixed_precision import forget_casts
from bamboo_trainer.tasks.reading.batch_reader import BatchReader
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, named_layer
from bamboo_trainer.training import TrainingConfig, loss_unit
from bamboo_trainer.transport.payloads import Contributed

_UNSCALED: Final = BackwardScale()


class Stage(SharedValues, EvaluatedState):
    """The state of one stage and its forward, backward and optimizer step.

    The boundary contract: outputs are all parts, and which of them need a gradient if not all do (`with_needs`);
    gradients are those of the floating-point parts only, in order (integer parts have none). A part that needs none, or
    that the loss does not depend on, has NO_GRADIENT: zeros would reach the parameters behind it. Saved contexts keep
    the inputs they were given (no copy): reuse a pooled buffer only after the microbatch's backward.
    """

    def __init__(
        self,
        task: Task,
        stage: int,
        stages: Sequence[tuple[int, int]],
        config: TrainingConfig,
        device: torch.device | str = "cpu",
        reader: BatchReader | None = None,
        copies: HostCopies | None = None,
        *,
        remembers: bool = True,
    ) -> None:
        """remembers: what an optimizer does; else it is never applied, and follows others' states (`WholeModel`).
        copies: bring what is received to the device.
        """
        self.version = 0
        self._task, self._stage, self._config = task, stage, config
        self.gradient_dtype = config.gradient_dtype  # of the final gradient
        self._reader = reader or BatchReader(task, config.samples)
        self._device, self._runs_ahead = torch.device(device), torch.device(device).type != "cpu"
        copies = copies or AtOnce(self._device)
        self.bring = copies.bring
        self.first, self._end = stages[stage]  # layers
        self.last = stage == len(stages) - 1
        built = {i: build_layer(task, config.seed, i) for i in range(self.first, self._end)}
        self._layers = apart_from_others(built, self._device, rounds=config.parameter_dtype is not torch.float32)
        groups = tied_groups(task)
        shared = tie(self._layers, groups, task, config.seed, apart=True)
        self._parameters = FlatParameters(self._layers, shared, self._device, config.parameter_dtype)
        self.buckets = tuple(bucket.place for bucket in self._parameters.buckets)  # of the gradient
        self._tied = tied_segments(self._parameters, groups, stages)
        self._elsewhere = {tied.group for tied in self._tied if min(tied.stages) != stage}  # told by another stage
        named = [(s.name, s.parameter) for s in self._parameters.slots] if remembers else []
        self._optimizer, ema = ScheduledOptimizer(task, named), config.ema if remembers else None
        self._optimizer_state = OptimizerState(
            self._parameters, self._optimizer, ema, config.loss_scale, tuple(self._layers), config.early
        )
        self._finite = FiniteState(self._layers, self._parameters, self._optimizer, self._optimizer_state, copies)
        self._weight_unit = loss_unit(task, config)
        load = partial(self._reader.batch, stage)
        self._forwards = ForwardRunner(task, config, self._layers, self._parameters, self._device, load, self.bring)
        self.compile_seconds = self._forwards.compile_seconds
        self._backwards = BackwardRunner(
            self._layers, self._parameters, self.bring, config.microbatches, splits=not self._forwards.repeats
        )
        snapshot.check(self._parameters, self._optimizer_state)
        self._running = RunningBuffers(self._layers)
        self._constants = Constants(self._layers, self._running.places())
        self._first_look = FirstLook(task, config, self._layers, self._parameters, frozenset(shared))
        self._evaluator = Evaluator(task, config, self._layers, self._device, self.last)
        self._state_bytes: tuple[int, int] | None = None
        self._digest: str | None = None
        self.context: ContextSize | None = None  # once a forward has been run
        self._parked, self._shared = False, frozenset[str]()
        self.as_built = None if config.compile else AsBuilt(self._layers)  # code that is compiled is for its attributes

    @property
    def size(self) -> int:
        """Elements of the final gradient."""
        return self._parameters.size

    @property
    def gradient_size(self) -> int:
        """Elements of a gradient in which each layer's use of a tied parameter still counts by itself."""
        return self._parameters.gradient_size

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int], *, bucketwise: bool = False) -> Work:
        """Work on a step's microbatches, whole groups of those that the bounds say. bucketwise: the last one's backward
        begins with one bucket, and `backward_rest` goes on with the others.
        """
        self._forwards.expect(self.version, microbatches)
        total = GradientSum(self.gradient_size, self._device, bounds, microbatches, self.gradient_dtype, self.buckets)
        return Work(total, bucketwise=microbatches[-1] if bucketwise else None)

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Detached outputs, or () on the last stage. `inputs` is None on stage 0, which loads the data.

        Repeating it for a microbatch gives the same bits and replaces the saved context.
        """
        if self.context is None and self.version == 0:
            self.look(step, microbatch, inputs)
        return self._forward(work, step, microbatch, inputs)

    def look(self, step: int, microbatch: int, inputs: Parts | None) -> None:
        """Before the first forward of all: is what the task does deterministic? Raises NotDeterministic."""
        if not self._config.deterministic:
            return
        given, place = None if inputs is None else split_needs(inputs)[0], (self._stage, step, microbatch)
        self._first_look.before(self._reader, place, given, self._device, self._forwards.call)

    def _forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        place = (step, microbatch, inputs, microbatch == work.bucketwise)
        if self.context:
            return self.complete(work, self._run(*place))
        found, self.context = self._first_look.during(partial(self._run, *place))
        return self.complete(work, found)

    def _run(self, step: int, microbatch: int, inputs: Parts | None, bucketwise: bool) -> Forwarding:
        forwarding = self._forwards.start(step, microbatch, inputs)
        forwarding.cuts = [] if bucketwise else None
        self._forwards.run(forwarding, self._end)
        return forwarding

    def start(self, step: int, microbatch: int, inputs: Parts | None, on_host: bool = False) -> Forwarding:
        """A forward that is run layer by layer with `advance` and ended with `complete`: the same bits as `forward`."""
        return self._forwards.start(step, microbatch, inputs, on_host)

    def advance(self, forwarding: Forwarding) -> None:
        """Run one more layer; after the last one of the model, the loss."""
        self._forwards.advance(forwarding)

    def complete(self, work: Work, forwarding: Forwarding) -> Parts:
        """Keep for the backward what a finished forward left; the detached outputs, or () on the last stage.

        They are sent and logged, so they must stay as they are when an optimizer step writes to the parameters.
        """
        assert forwarding.done
        work.contributions[forwarding.microbatch] = self._running.record(forwarding.capture.contributed)
        work.complete(forwarding, last=self.last)
        if self.last:
            scale, metrics = self._optimizer_state.loss_scale, work.metrics[forwarding.microbatch]
            if scale and len(metrics) < MOST_METRICS:
                work.metrics[forwarding.microbatch] = metrics | {LOSS_SCALE: (scale.scale, 1.0)}
            return ()
        outputs = [p.detach() for p in forwarding.parts]
        kept = tuple([p.clone() if self._parameters.holds(p) else p for p in outputs])
        return with_needs(kept, [p.requires_grad for p in forwarding.parts])

    @property
    def runs_ahead(self) -> bool:
        """Does the device go on by itself with what was started?"""
        return self._runs_ahead

    def wait(self) -> None:
        """Until what was started on the device is done."""
        wait_for(self._device)

    def park(self, parked: bool) -> None:
        """Keep the optimizer's state in host memory, but for the steps; or no more."""
        if parked and not self._parked:
            self._optimizer_state.park()
            self.wait()  # the copies are under way
        elif self._parked and not parked:
            self._optimizer_state.fetch(self._device)
        self._parked = parked

    def expect(self, coming: Iterable[tuple[int, int]]) -> None:
        """These steps' microbatches are the next ones to be run forward: their data are read in the background."""
        if self._stage == 0 or self.last:
            self._reader.expect(self._stage, coming)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """A forward and a backward for nothing but to have them run once. The outputs, as of `forward`."""
        work = self.begin([microbatch], [microbatch, microbatch + 1])
        outputs = self._forward(work, step, microbatch, inputs)
        zeros = tuple(torch.zeros_like(p) for p in split_needs(outputs)[0] if p.is_floating_point())
        self.backward(work, step, microbatch, None if self.last else zeros)
        return outputs

    @property
    def layers(self) -> int:
        return len(self._layers)

    def named_layer(self, layer: int) -> str:
        """In a sentence."""
        return named_layer(self._layers[layer], layer)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Parts | None, *, postpone: bool = False
    ) -> Parts:
        """Adds to the sum of gradients; returns the gradients of the floating-point inputs, () on stage 0.

        `gradients` belong to the floating-point outputs, and behind them is the weight of the microbatch's loss if that
        is a sum; None on the last stage, which starts from loss / microbatches, or from a sum. The saved context is
        used up. What is returned ends with the weight as well.

        postpone: leave what only the sum needs to `weight_gradients`, as far as that can be told apart.
        """
        assert (gradients is None) == self.last
        scale = self._backward_scale()
        return self._backwards.run(work, (step, microbatch), gradients, scale, postpone=postpone)

    def send_back(self, work: Work, microbatch: int) -> None:
        """On the last stage: what the loss sends back to the last layer, without the backward behind it; for a work
        that is watched.
        """
        work.send_back(microbatch, self._config.microbatches, self._backward_scale())

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        """Of a backward that goes bucket by bucket the next one; nothing if the forward was run in another way."""
        self._backwards.next_part(work, (step, microbatch))

    def weight_gradients(self, work: Work, step: int, microbatch: int) -> None:
        """Adds to the sum of gradients what a backward has postponed: nothing if that was nothing. In order."""
        self._backwards.weights(work, step, microbatch)

    def _backward_scale(self) -> BackwardScale:
        scale = self._optimizer_state.loss_scale
        return BackwardScale(scale.scale, scale.scale / self._weight_unit) if scale else _UNSCALED

    @property
    def _unscale(self) -> float:
        """A power of two: it changes no bit of a gradient, but for numbers that are too small for fp32."""
        scale = self._optimizer_state.loss_scale
        return 1.0 / scale.scale if scale else 1.0

    def evaluate(self, work: Work, batch: int, inputs: Parts | None) -> Parts:
        """A forward of a batch of the evaluation's data, in eval mode: outputs, or () on the last stage."""
        outputs, found = self._evaluator.run(self.version, batch, inputs, self._reader)
        if self.last:
            work.evaluated[batch] = found
        return tuple(p.clone() if self._parameters.holds(p) else p for p in outputs)

    def squared_norms(self, gradient: Tensor) -> Tensor:
        """Of each parameter's final gradient, unscaled, in fp64. A tied parameter is told by its lowest stage only."""
        slots = [slot for slot in self._parameters.slots if slot.group not in self._elsewhere]
        squares = [slot.of(gradient).double().square_().sum() for slot in slots]
        return torch.stack(squares) * self._unscale**2 if squares else gradient.new_empty(0, dtype=torch.float64)

    @property
    def running_size(self) -> int:
        """Bytes of all buffers that forwards contribute to."""
        return self._running.size

    def check_contributed(self, told: Contributed) -> None:
        """Of another pipeline's forwards: ValueError if it could not be folded into this stage's running buffers."""
        self._running.check(told)

    def folded(self, contributions: Mapping[int, Recorded]) -> Parts:
        """Of all microbatches of this step: the bytes of the running buffers after it; () if the stage has none."""
        return self._running.folded(contributions, self._config.microbatches)

    def takes(self, final: Parts) -> bool:
        """Do these have the form of what `apply` takes: the gradient, and the running buffers if there are any?"""
        sizes = (self.size, self.running_size) if self._running else (self.size,)
        return tuple(part.numel() for part in final) == sizes and final[0].dtype is self.gradient_dtype

    def apply(
        self, gradient: Tensor, norm: float, running: Tensor | None = None, *, scale: float = 1.0, tries: bool = False
    ) -> None:
        """One optimizer step with the final gradient, which is not modified, times scale; `norm` is the global one's.

        running: the bytes of the running buffers after the step, as `folded` has made them. tries: an optimizer that is
        built anew has to come to the same bits; raises NotDeterministic if it does not.
        A parameter that no microbatch has used stays as it is, and so does what the optimizer remembers of it.
        """
        self._constants.check()
        self._finite.confirm()
        used = self._parameters.used(gradient)
        ready = self.bring([gradient])[0].to(torch.float32)
        limit = self._config.max_gradient_norm
        scale *= self._unscale * (1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        if scale != 1.0 or (ready is gradient and not self._optimizer.only_reads):
            ready = ready * scale  # a copy: an optimizer may write to its gradients
        self._parameters.bind_final(ready, used)
        if self._parked:
            self._optimizer_state.fetch(self._device)
        trial = self._optimizer_state.trial(self._task, self._optimizer, self.version) if tries else None
        self._optimizer.step(self.version)
        if trial:
            trial.compare(self.version)
        self._optimizer_state.average()
        self._optimizer_state.scaled(finite=True)
        if not math.isfinite(norm):
            self._finite.gradient_was_not()
        self._finite.look(self.version)
        if self._parked:
            self._optimizer_state.park()
            self.wait()
        self._parameters.unbind()
        if running is not None:
            self._running.set(running)
            self._constants.renew_running()
        forget_casts()
        if not self._optimizer_state.fixed:  # it begins for each parameter with the first step that uses it
            snapshot.check(self._parameters, self._optimizer_state)
            self._state_bytes = None
        self._digest = None
        self.version += 1

    def allow_commit(self) -> None:
        """To be asked before the step that begins at this version may be committed: are its rates such as an optimizer
        can use, and did the step before leave finite parameters? Raises TaskError.
        """
        self._optimizer.settings(self.version)
        self._finite.confirm()

    def skip(self, *, finite: bool) -> None:
        """Go to the next version without applying anything. finite: are its gradients, and only the loss is not?"""
        self._constants.check()
        self._finite.confirm()
        self._parameters.unbind()
        forget_casts()
        self._optimizer_state.scaled(finite=finite)
        self._digest = None
        self.version += 1

    def learning_rate(self, step: int) -> float:
        """The task's, which is the same on every stage."""
        return self._optimizer.learning_rate(step)

    def tied_segments(self) -> tuple[TiedSegment, ...]:
        """The tied groups whose layers' gradients are to be summed, by group."""
        return self._tied

    def snapshot(self) -> tuple[Parts, dict[str, Any]]:
        """Copies of the whole state: one tensor per parameter, buffer and optimizer tensor; and `snapshot`'s meta.

        Names are "parameter:0.weight", "constant:0.mask", "state:0.weight:exp_avg"; a tied parameter has its
        group's first name.
        """
        self._finite.confirm()
        return snapshot.take(self._parameters, self._optimizer_state, self.version)

    def restore(self, parts: Parts, meta: Mapping[str, Any]) -> None:
        """Takes a snapshot's state over; ValueError, with nothing changed, if it does not fit this stage."""
        self.version = snapshot.restore(self._parameters, self._optimizer_state, parts, meta)
        self._state_bytes = self._digest = None
        self._finite.forget()
        self._constants.renew()
        forget_casts()
        if self._parked:
            self._optimizer_state.park()

    def layer_states(self, only: Collection[int] | None = None, *, shown: bool = True) -> dict[int, LayerState]:
        """Copies of the state of these layers of the stage, by number; of all if None.

        shown: with what the layers' state_dict has beside what they hold, for who reads the state dict.
        """
        self._finite.check_all(self.version)
        layers = {i: layer for i, layer in self._layers.items() if only is None or i in only}
        return layer_state.take(layers, self._parameters, self._optimizer_state, self.version, shown=shown)

    def late_copies(self, only: Collection[int]) -> LateCopies:
        """The same of these layers, made piece by piece; to be done before the state changes."""
        self._finite.check_all(self.version)
        layers = {i: layer for i, layer in self._layers.items() if i in only}
        late = LateCopies.KINDS
        return LateCopies(layer_state.take(layers, self._parameters, self._optimizer_state, self.version, late=late))

    def layers_needed(self) -> tuple[int, ...]:
        """Whose states `restore_layers` needs: the stage's own layers, and those that tied parameters belong to."""
        return layer_state.needed(self._layers, self._parameters)

    def restore_layers(self, states: Mapping[int, LayerState]) -> None:
        """Takes these over, from whatever split; ValueError, with nothing changed, if they do not fit this stage."""
        self.restore(*layer_state.snapshot_of(self._layers, self._parameters, self._optimizer_state, states))

    def digest(self) -> str:
        """Of parameters, buffers and optimizer state; equal digests mean bit-equal state.

        It is computed once for each version: that reads the whole state, and it is asked for at every announcement.
        """
        if self._digest is None:
            self._finite.check_all(self.version)
            self._digest = snapshot.digest(self._parameters, self._optimizer_state)
        return self._digest

    def share_of_digest(self) -> str:
        """The same without the tied parameters that another stage tells: the model's is the sum of all stages' shares,
        and does not depend on how the layers are split (`add_digests`). A frozen one is told where its first layer is.
        """
        trained = {slot.name for slot in self._parameters.slots if slot.group in self._elsewhere}
        layers = range(self.first, self._end)
        frozen = {name for name in self._parameters.constants if int(name.partition(".")[0]) not in layers}
        elsewhere = frozenset(trained | frozen)
        self._finite.check_all(self.version)
        return snapshot.digest(self._parameters, self._optimizer_state, elsewhere) if elsewhere else self.digest()

    def checksums(self) -> dict[str, int]:
        """Of parameters and buffers, by what they are called in a sentence; the same for all who hold the stage.

        Raises TaskError if a buffer has changed. Takes a third of the time of an optimizer step (bench/determinism.py).
        """
        self._constants.check(bits=True)
        return {layer_state.in_words(self._layers, name): checksum(tensor) for name, tensor in self._parameters.named()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies by "layers.<layer>.<name>": parameters (tied ones by every name) and persistent buffers."""
        return {
            f"layers.{index}.{name}": tensor.detach().to("cpu", copy=True)
            for index, layer in self._layers.items()
            for name, tensor in layer.state_dict().items()
        }
