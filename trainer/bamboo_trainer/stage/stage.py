"""The computations of one stage: forwards, backwards and weight gradients of its microbatches.

A `Stage` knows no peers, no schedule, no clock. Every result is a pure function of (task, seed, version, step,
microbatch): an owner, its shadow and a later replay get the same bits.

`AsBuilt` runs code without the changes that earlier calls have made to plain attributes of a stage's modules. A worker
that takes over has just built its layers, so a layer whose results depend on its earlier calls gives other results
there. Only numbers, texts and None are compared: a generator or list kept by a layer is not compared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_pre_hook

from bamboo_core.control.protocol import LOSS_SCALE, MOST_METRICS
from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.memory.gpus import QueueMark, wait_for
from bamboo_trainer.memory.host_copies import AtOnce, Bring, HostCopies
from bamboo_trainer.stage.forwarding import Forwarding, ForwardRunner
from bamboo_trainer.stage.gradients import GradientSum, split
from bamboo_trainer.stage.parameters import Ends, FlatParameters, add_norm_sums, norm_sums, parts_of
from bamboo_trainer.stage.values import StageValues
from bamboo_trainer.stage.work import BackwardScale, Gradients, Work, edge_of
from bamboo_trainer.task import Parts, Sum, Task
from bamboo_trainer.tasks.evaluation import evaluated_samples, measured
from bamboo_trainer.tasks.inspection import Draws
from bamboo_trainer.tasks.mixed_precision import REDUCED
from bamboo_trainer.tasks.readers import BatchReader
from bamboo_trainer.tasks.running_buffers import evaluating
from bamboo_trainer.tasks.task_errors import TaskError, in_task
from bamboo_trainer.tasks.ties import HAVE_IT, stranger
from bamboo_trainer.tasks.user_code import (
    load_batch,
    named_layer,
    no_new_parameters,
    run_layer,
    seed_forward,
    unchanged_buffers,
)
from bamboo_trainer.training import TrainingConfig, loss_unit

PLAIN: Final = (int, float, str, type(None))  # and bool
_OWN: Final = frozenset(vars(nn.Module()))  # of every module


class AsBuilt:
    """The plain attributes of modules at the time of construction."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._first = {
            (layer, path): (module, _plain(module))
            for layer, whole in layers.items()
            for path, module in whole.named_modules()
        }

    def changed(self) -> tuple[str, ...]:
        """Describe each attribute that differs from its value at construction."""
        return tuple(
            f"{name!r} of {type(module).__name__} in layer {layer}"
            for (layer, _), (module, first) in self._first.items()
            for name in _differing(module, first)
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Restore the attributes as built within this context, and afterwards their values from before it."""
        kept = [(module, {name: vars(module)[name] for name in _plain(module)}) for module, _ in self._first.values()]
        for module, first in self._first.values():
            _set(module, first)
        try:
            yield
        finally:
            for module, now in kept:
                _set(module, now)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {n: value for n, value in vars(module).items() if n not in _OWN and type(value) in (*PLAIN, bool)}


def _differing(module: nn.Module, first: Mapping[str, Any]) -> list[str]:
    """Return the names of plain attributes that are new or changed. Attributes that were plain and now hold another
    kind of object are caches, and left out.
    """
    now = _plain(module)
    return [n for n in now if n not in first or type(now[n]) is not type(first[n]) or now[n] != first[n]]


def _set(module: nn.Module, wanted: Mapping[str, Any]) -> None:
    """Set the plain attributes to these values, and remove other plain ones."""
    for name in _differing(module, wanted):
        if name in wanted:
            setattr(module, name, wanted[name])
        else:
            delattr(module, name)
    for name in wanted.keys() - vars(module).keys():
        setattr(module, name, wanted[name])


class Evaluator:
    """Evaluates a stage's layers, given by number. last: this is the last stage of the pipeline."""

    def __init__(
        self, task: Task, config: TrainingConfig, layers: Mapping[int, nn.Module], device: torch.device, last: bool
    ) -> None:
        self._task, self._config, self._layers, self._device, self._last = task, config, layers, device, last

    def run(self, version: int, batch: int, inputs: Parts | None, reader: BatchReader) -> tuple[Parts, dict[str, Sum]]:
        """Return the stage's outputs; on the last stage (), and the sums measured on the batch.

        A pure function of the parameters and the batch. inputs: None on the first stage, which reads them.
        """
        samples, targets = 0, Parts()
        if inputs is None or self._last:
            read, targets, samples = self._read(batch, reader)
            inputs = read if inputs is None else inputs
        parts = tuple(p.to(self._device) for p in inputs)
        with torch.no_grad(), evaluating(self._layers.values()), _uncached(self._device, self._config.precision):
            for index, layer in self._layers.items():
                seed_forward(self._device, pure_seed("evaluation", self._config.seed, version, batch, index))
                parts = run_layer(layer, index, parts)
        if not self._last:
            return parts, {}
        with torch.no_grad():
            assert self._task.evaluation is not None
            on_device = tuple(p.to(self._device) for p in targets)
            return (), measured(self._task, self._task.evaluation, parts, on_device, samples)

    def _read(self, batch: int, reader: BatchReader) -> tuple[Parts, Parts, int]:
        """Return inputs, targets, and their number of samples."""
        assert self._task.evaluation is not None
        samples = evaluated_samples(self._task.evaluation, batch, self._config.micro_batch_size)
        with reader.quiet():
            inputs, targets = load_batch(self._task, samples, self._task.evaluation.dataset)
        return inputs, targets, len(samples)


def _uncached(device: torch.device, precision: str) -> "torch.autocast | nullcontext[None]":
    """Return autocast without a cache: casts made without a graph must not be found by a forward that needs one."""
    dtype = REDUCED.get(precision)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()


WATCHED: Final = 4  # the first backwards of a stage, watched for modules that run again


class BackwardRunner:
    """Runs backwards. Gradients are summed in the order of the microbatches, whenever they are computed."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        parameters: FlatParameters,
        bring: Bring,
        microbatches: int,
        *,
        splits: bool,
    ) -> None:
        """Create the runner.

        bring: copies gradients to the device. microbatches: of a step. splits: weight gradients may be postponed, which
        layers that run again in the backward do not allow.
        """
        self._parameters, self._bring, self._microbatches = parameters, bring, microbatches
        self._named = f"layers {min(layers)} to {max(layers)}"
        self._first, self._splits, self._unwatched = min(layers) == 0, splits, WATCHED
        self._modules = {id(module) for layer in layers.values() for module in layer.modules()}

    def run(
        self, work: Work, place: tuple[int, int], gradients: Gradients | None, scale: BackwardScale, *, postpone: bool
    ) -> Gradients:
        """Run a backward; see `Stage.backward`. place: step and microbatch. postpone: weight gradients, if that changes
        no bit.
        """
        step, microbatch = place
        added = len(work.added.get(microbatch, ()))
        leaves, given = work.ends(microbatch, gradients, self._microbatches, scale)
        cuts = work.cuts.pop(microbatch, None)
        if cuts:
            assert self._first  # no stage waits for gradients of its inputs
            self._compute_all(work, step)
            self._bind(work.gradients)
            add_norm_sums(work.gradients.target, work.statistics.pop(microbatch, ()))  # the first bucket may have some
            work.parts = parts_of(given, added, cuts)
            self.next_part(work, place)
            return ()
        pairs = self._reached(given)
        if pairs:
            with in_task(self._doing(place)):
                if not (postpone and self._postponed(work, microbatch, pairs, leaves)):
                    self._compute_all(work, step)
                    backward = partial(torch.autograd.backward, [p for p, _ in pairs], [g for _, g in pairs])
                    self._add(work, microbatch, backward)
        if microbatch not in work.postponed:
            self._compute_all(work, step)
            if microbatch in work.statistics:  # of a stage in which nothing is trained
                self._add(work, microbatch, lambda: None)
            work.gradients.added(microbatch)
        if self._first:
            return ()
        inputs = tuple(p.grad for p in leaves if p.is_floating_point())
        if microbatch in work.postponed:
            for leaf in leaves:
                leaf.grad = None  # what is sent must not stay as long as the graph
        return inputs

    def next_part(self, work: Work, place: tuple[int, int]) -> None:
        """Run the next part of a backward that goes bucket by bucket, if any is left."""
        if work.parts is None:
            return
        part, parameters, total = next(work.parts), self._parameters, work.gradients
        pairs = self._reached(part.ends)
        if pairs:
            self._bind(total)
            with in_task(self._doing(place)):
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
            parameters.mark(total.target, total.marked)
        if part.last:
            work.parts = None
            total.added(place[1])

    def _reached(self, ends: Ends) -> list[tuple[GradientEdge, Tensor]]:
        """Return the ends that need their gradient, on the device."""
        edges = [(end if isinstance(end, GradientEdge) else edge_of(end), g) for end, g in ends]
        reached = [(edge, g) for edge, g in edges if edge is not None]
        return list(zip([edge for edge, _ in reached], self._bring([g for _, g in reached]), strict=True))

    def _doing(self, place: tuple[int, int]) -> str:
        return f"the backward of {self._named}, at step {place[0] + 1}, microbatch {place[1]},"

    def _postponed(self, work: Work, microbatch: int, pairs: list[tuple[GradientEdge, Tensor]], leaves: Parts) -> bool:
        """Compute only the inputs' gradients, and return True, if this microbatch's backward can be split."""
        if not self._splits:
            return False
        with self._watched() if self._unwatched else nullcontext():
            rest = split(pairs, leaves)
        if rest is not None:
            work.postponed[microbatch] = rest
        return rest is not None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Stop splitting backwards if a layer runs again in one: it would run again in each part.

        Checkpointed layers of the task are known (`Task.checkpointed`); a module may do it by itself.
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
            with in_task(self._doing((step, earlier))):
                self._add(work, earlier, rest.compute)
            work.gradients.added(earlier)

    def _compute_all(self, work: Work, step: int) -> None:
        if work.postponed:
            self.weights(work, step, max(work.postponed))

    def _bind(self, total: GradientSum) -> None:
        """Make backwards add to the sum's target."""
        if not total.is_begun:
            self._parameters.unbind()  # from a finished sum, which may have to make room
        self._parameters.bind(total.target)

    def _add(self, work: Work, microbatch: int, compute: Callable[[], None]) -> None:
        """Add to the sum a microbatch's parameter gradients, which `compute` computes, and its norms' statistics.

        For a half of a sum they are computed separately first: a parameter may be reached more than once, and its
        gradients must be summed before they are added to the other half.
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


_UNSCALED: Final = BackwardScale()


class Stage:
    """Computes on a stage's `values`, which no forward and no backward changes.

    The boundary contract: outputs are all parts, and require a gradient if anything before them is trained. Gradients
    are those of the floating-point parts only, in order (integer parts have none). A part that needs none, or that the
    loss does not depend on, has None: zeros would reach the parameters behind it. Saved contexts keep the inputs they
    were given (no copy): reuse a pooled buffer only after the microbatch's backward.

    has_run: a forward was run. as_built: the modules' attributes as built; None for compiled modules, whose code is
    specialized on them.
    """

    def __init__(
        self,
        values: StageValues,
        reader: BatchReader | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        """Create the stage. reader: of the task's data. copies: bring received tensors to the device of the values."""
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
        self._evaluator = Evaluator(task, config, layers, device, values.last)
        self.has_run = False
        self.as_built = None if config.compile else AsBuilt(layers)

    def begin(self, microbatches: Sequence[int], bounds: Sequence[int], *, bucketwise: bool = False) -> Work:
        """Begin work on a step's microbatches: whole groups, divided at the bounds. bucketwise: the last microbatch's
        backward begins with one bucket, and `backward_rest` continues with the others.
        """
        self._forwards.expect(self.values.version, microbatches)
        final = self.values.final
        total = GradientSum(final.gradient_size, self.values.device, bounds, microbatches, final.buckets)
        return Work(total, bucketwise=microbatches[-1] if bucketwise else None)

    def forward(self, work: Work, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Run a forward; return detached outputs, or () on the last stage. inputs: None on stage 0, which loads data.

        Repeating it for a microbatch gives the same bits and replaces the saved context.
        """
        return self.complete(
            work, self.checked(partial(self._run, step, microbatch, inputs, microbatch == work.bucketwise))
        )

    def checked(self, run: Callable[[], Forwarding]) -> Forwarding:
        """Run a forward. Raises TaskError if the first one changes buffers, or uses parameters of other layers."""
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
        """Run one more layer; after the last one of the model, the loss."""
        self._forwards.advance(forwarding)

    def complete(self, work: Work, forwarding: Forwarding) -> Parts:
        """Keep a finished forward for the backward; return the detached outputs, or () on the last stage.

        Outputs are sent and logged, so an optimizer step that writes to the parameters must not change them.
        """
        assert forwarding.done
        if captured := forwarding.capture.contributed:
            following = self._config.microbatches - 1 - forwarding.microbatch
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
        """Return an empty record of the random numbers that each layer draws without a seed."""
        return {layer: Draws(self._reader.quiet) for layer in self.values.layers}

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works asynchronously."""
        return self.values.device.type != "cpu"

    def wait(self) -> None:
        """Wait for the work started on the device."""
        wait_for(self.values.device)

    def bring(self, tensors: Iterable[Tensor]) -> Parts:
        """Return received tensors on the device."""
        brought = self._copies.bring(tensors)
        if self._marks_inputs:
            self._marks_inputs, self._entry = False, self.mark()
        return brought

    def mark(self) -> QueueMark:
        """Return a mark behind the work queued on the device."""
        return self._copies.mark()

    def mark_inputs(self) -> None:
        """Put a mark behind the next inputs brought to the device: what follows does not wait for inputs."""
        self._marks_inputs, self._entry = True, None

    def take_entry(self) -> QueueMark | None:
        """Return that mark; None if nothing was brought."""
        entry, self._marks_inputs, self._entry = self._entry, False, None
        return entry

    def expect(self, coming: Iterable[tuple[int, int]]) -> None:
        """Read the data of the next microbatches' forwards in the background. coming: step and microbatch of each."""
        if self.values.index == 0 or self.values.last:
            self._reader.expect(self.values.index, coming)

    def rehearse(self, step: int, microbatch: int, inputs: Parts | None) -> Parts:
        """Run a forward and a backward, and drop their gradients. Return the outputs, as `forward` does."""
        work = self.begin([microbatch], [microbatch, microbatch + 1])
        outputs = self.forward(work, step, microbatch, inputs)
        zeros = tuple(torch.zeros_like(p) for p in outputs if p.is_floating_point())
        self.backward(work, step, microbatch, None if self.values.last else zeros)
        return outputs

    def named_layer(self, layer: int) -> str:
        """Return a name of the layer for messages."""
        return named_layer(self.values.layers[layer], layer)

    def backward(
        self, work: Work, step: int, microbatch: int, gradients: Gradients | None, *, postpone: bool = False
    ) -> Gradients:
        """Add to the sum of gradients; return the gradients of the floating-point inputs, () on stage 0.

        gradients: of the floating-point outputs; None on the last stage, which starts from loss / microbatches, or from
        a sum, whose weight the work has on every stage. Uses up the saved context. postpone: leave work that only the
        sum needs to `weight_gradients`, where it can be separated.
        """
        assert (gradients is None) == self.values.last
        scale = self.values.common.loss_scale
        factors = BackwardScale(scale.scale, scale.scale / self._weight_unit) if scale else _UNSCALED
        return self._backwards.run(work, (step, microbatch), gradients, factors, postpone=postpone)

    def backward_rest(self, work: Work, step: int, microbatch: int) -> None:
        """Run the next part of a backward that goes bucket by bucket; nothing for other backwards."""
        self._backwards.next_part(work, (step, microbatch))

    def weight_gradients(self, work: Work, step: int, microbatch: int) -> None:
        """Add the gradients that a backward has postponed, if any. Must be called in order."""
        self._backwards.weights(work, step, microbatch)

    def evaluate(self, work: Work, batch: int, inputs: Parts | None) -> Parts:
        """Run the forward of an evaluation batch, in eval mode; return outputs, or () on the last stage."""
        outputs, sums = self._evaluator.run(self.values.version, batch, inputs, self._reader)
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
