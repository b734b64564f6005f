"""Is what the task does a pure function of what it is given? Looked at when a stage first runs, layer by layer.

A worker that takes over repeats another one's work and must come to the same bits. What does not would train unsoundly,
and nobody would see it. So each layer is built a second time, and one microbatch is run twice, forward and backward.
That takes the time of two microbatches, once, and the memory of one more layer.
"""

import logging
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.capture import Capture, Contributed
from bamboo_trainer.tasks.task_errors import TaskError, in_task, ran_out_of_memory
from bamboo_trainer.tasks.ties import forbid_training
from bamboo_trainer.tasks.user_code import (
    build_layer,
    named_layer,
    no_new_parameters,
    run_layer,
    same_bits,
    unchanged_buffers,
)

Batch = tuple[Parts, Parts]  # inputs and targets
Call = Callable[..., Any]

logger = logging.getLogger(__name__)

CAUSES: Final = (
    "usual causes: random numbers of Python or numpy, or of a generator that is kept (torch's global one is seeded "
    "before each layer), something kept from an earlier call, the time, the order of a set, "
    "a GPU kernel that adds in any order"
)


class NotDeterministic(TaskError):
    """An error for work that, done again, did not come to the same bits; the message names the first layer and tensor
    that differ.
    """


@dataclass(frozen=True, slots=True)
class DeterminismCheck:
    """What is looked at."""

    task: Task
    seed: int
    layers: dict[int, nn.Module]
    shared: frozenset[int]  # ids of parameters that have another layer's value, and so are not as they were built
    # (layer, inputs, capture of what it contributes to running buffers) -> its result, with all that its bits depend on
    # but other calls
    call: Call
    loss: Callable[[Parts], Parts] | None  # of the last layer's outputs, on the last stage; and its weight

    def check(self, inputs: Parts) -> None:
        """Raises NotDeterministic, or TaskError for whatever else is wrong. The layers must be as they were built.

        inputs: of the first layer.
        """
        parts = inputs
        for index, layer in self.layers.items():
            try:
                self._built_twice(index, layer)
                with no_new_parameters({index: layer}), unchanged_buffers({index: layer}):
                    parts = self._run_twice(index, layer, parts)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                logger.warning("%s was not checked, since there is not enough memory for it", named_layer(layer, index))
                return
        if self.loss:
            self._compare("the loss", parts, self.loss, [])

    def _built_twice(self, index: int, layer: nn.Module) -> None:
        second = build_layer(self.task, self.seed, index)
        if second is layer:
            return  # it is made once; whether it is shared is looked at elsewhere
        forbid_training(second, index, {id(p) for own in self.layers.values() for p in own.parameters()})
        own, other = _state(layer, self.shared), _state(second, frozenset())
        for name, tensor in own.items():
            made = other.get(name)
            if isinstance(made, nn.Parameter):
                made = made.to(tensor.dtype)  # a stage rounds its own
            if made is None or not same_bits(tensor.detach().cpu(), made.detach().cpu()):
                raise NotDeterministic(
                    f"{named_layer(layer, index)} is not deterministic: built twice from the same seed, "
                    f"{name} differs; {CAUSES}"
                )

    def _run_twice(self, index: int, layer: nn.Module, parts: Parts) -> Parts:
        captures: list[Capture] = []

        def run(given: Parts) -> Parts:
            captures.append(Capture(count=1 << 30, momentum=0.5) if captures else Capture(fill=1.0))
            return run_layer(layer, index, given, lambda one: self.call(index, one, captures[-1]))

        trained = [(name, p) for name, p in layer.named_parameters() if p.requires_grad]
        outputs = self._compare(named_layer(layer, index), parts, run, trained)
        first, second = captures[:2]
        compare_contributions(layer, index, first.contributed, second.contributed)
        compare_losses(layer, index, first, second)
        return outputs

    def _compare(
        self, who: str, parts: Parts, run: Callable[[Parts], Parts], trained: Sequence[tuple[str, Tensor]]
    ) -> Parts:
        """The outputs of two equal runs, without their graph."""
        drawn = _Draws()
        with drawn.watched():
            first, gradients = _forward_and_backward(who, run, parts, trained)
        with drawn.watched():
            second, others = _forward_and_backward(who, run, parts, trained)
        if source := drawn.each_time():
            raise NotDeterministic(
                f"{who} is not deterministic: it draws from {source}; "
                "use torch's global generator, which is seeded before each layer"
            )
        names = [*(f"the gradient of parameter {name!r}" for name, _ in trained), *_gradients_of(parts)]
        if names and not gradients:
            logger.warning("the backward of %s was not checked: it has a checkpoint with use_reentrant=True", who)
        outputs = ["its output"] if len(first) == 1 else [f"output {i}" for i in range(len(first))]
        for name, one, other in zip_longest([*outputs, *names], [*first, *gradients], [*second, *others]):
            if not _same(one, other):
                raise NotDeterministic(
                    f"{who} is not deterministic: run twice on the same microbatch, {name} differs; {CAUSES}"
                )
        return first


def compare_contributions(layer: nn.Module, index: int, one: Contributed, other: Contributed) -> None:
    """Raises TaskError if two equal runs of a layer contribute different values to its running buffers."""
    if [module for module, _ in one] == [module for module, _ in other] and all(
        len(first) == len(second) and all(map(same_bits, first, second))
        for (_, first), (_, second) in zip(one, other, strict=True)
    ):
        return
    paths = {id(module): path for path, module in layer.named_modules()}
    names = sorted({paths.get(id(module), "?") for module, _ in (*one, *other)})
    raise NotDeterministic(
        f"{named_layer(layer, index)} is not deterministic: run twice on the same microbatch, what it contributes to "
        f"the buffers of {' or '.join(repr(name) for name in names)} differs. A module that is derived from BatchNorm "
        "or InstanceNorm has to update its running statistics as these do, with its momentum, and must not read them "
        "in training; otherwise declare them with bamboo_trainer.task.track_buffers"
    )


def compare_losses(layer: nn.Module, index: int, one: Capture, other: Capture) -> None:
    """What a layer adds to the loss in two equal runs; NotDeterministic if it differs."""
    for (name, first), (_, second) in zip_longest(one.losses, other.losses, fillvalue=("", None)):
        if first is None or second is None or not same_bits(first.detach(), second.detach()):
            raise NotDeterministic(
                f"{named_layer(layer, index)} is not deterministic: run twice on the same microbatch, the loss "
                f"{name!r} that it adds differs; {CAUSES}"
            )


def compare_batches(one: Batch, other: Batch, samples: Sequence[int]) -> None:
    """NotDeterministic if the dataset did not give the same for the same samples."""
    for name, first, second in zip(("inputs", "targets"), one, other, strict=True):
        if len(first) != len(second) or not all(map(same_bits, first, second)):
            asked = f"asked twice for samples {list(samples)[:8]}"
            raise NotDeterministic(f"the dataset is not deterministic: {asked}, it returned different {name}; {CAUSES}")


def _forward_and_backward(
    who: str, run: Callable[[Parts], Parts], parts: Parts, trained: Sequence[tuple[str, Tensor]]
) -> tuple[Parts, list[Tensor | None]]:
    """Detached outputs; the gradients of trained parameters and of floating-point inputs, None for what is not used.

    No gradients at all if torch cannot be asked for these alone.
    """
    leaves = tuple(p.detach().requires_grad_(p.is_floating_point()) for p in parts)
    with torch.enable_grad():
        outputs = run(leaves)
    ends = [p for p in outputs if p.requires_grad]
    wanted = [*(p for _, p in trained), *(p for p in leaves if p.requires_grad)]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if _has_reentrant_checkpoint(ends):
        gradients = []
    elif ends and wanted:
        with in_task(f"the backward of {who}"):
            gradients = torch.autograd.grad(ends, wanted, [_uneven(p) for p in ends], allow_unused=True)
    return tuple(p.detach() for p in outputs), list(gradients)


def _has_reentrant_checkpoint(ends: Sequence[Tensor]) -> bool:
    """Whether a graph has a reentrant checkpoint: that runs a backward of its own, and refuses to be a part of one that
    is for some gradients only.
    """
    nodes: list[Any] = [end.grad_fn for end in ends if end.grad_fn is not None]  # what is passed on has none
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return False


def _uneven(tensor: Tensor) -> Tensor:
    """A gradient for it: from -1 to 1, since equal ones vanish behind a softmax or a norm."""
    return torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)


def _gradients_of(parts: Parts) -> list[str]:
    return [f"the gradient of input {i}" for i, p in enumerate(parts) if p.is_floating_point()]


def _state(layer: nn.Module, without: frozenset[int]) -> dict[str, Tensor]:
    """Parameters and buffers by what they are called in a sentence."""
    parameters = {f"parameter {name!r}": p for name, p in layer.named_parameters() if id(p) not in without}
    return {**parameters, **{f"buffer {name!r}": b for name, b in layer.named_buffers()}}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else same_bits(one, other)


@dataclass(slots=True)
class _Draws:
    """Who drew random numbers that nobody seeded, in each of several runs.

    It is told even if the numbers make no difference now: a layer that is left out one time in ten is left in twice.
    """

    runs: list[set[str]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block that notes which random numbers a run in it draws. It looks at this thread alone: the control channel
        draws numbers, too.
        """
        found: set[str] = set()
        seeded = False

        def called(_frame: object, event: str, function: Any) -> None:
            nonlocal seeded
            if event != "c_call" or getattr(function, "__self__", None) is not _GLOBAL:
                return
            seeded = seeded or function.__name__ in ("seed", "setstate")
            if not seeded and function.__name__ in ("random", "getrandbits"):
                found.add("Python's random")

        before, profiled = _numpy_state(), sys.getprofile() is not None
        if not profiled:  # whoever profiles a worker keeps the profiler; some cannot be set again
            sys.setprofile(called)
        try:
            yield
        finally:
            if not profiled:
                sys.setprofile(None)
        if _numpy_state() != before:
            found.add("numpy.random")
        self.runs.append(found)

    def each_time(self) -> str:
        """The state of numpy's generator stays the same from the second run on if each run seeds it."""
        return " and ".join(sorted(set.intersection(*self.runs)))


_GLOBAL: Final = getattr(random.random, "__self__", None)  # the generator behind the module's functions


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return pickle.dumps(numpy.get_state(legacy=False))
