"""Inspection of a task: layers run without data, their costs, and checks for forbidden behavior.

`look` walks along a task's layers, each on the outputs of the one before, for example to find their costs. The
layers run on tensors without data (torch's FakeTensorMode), which usually takes hardly any memory or time, however
large they are. They run in a child process: in this one, a table that a layer's code caches would stay without data.
If a layer fails without data, as when its control flow depends on values, all run with data in this process.
"""

import logging
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from bamboo_core.complaints import said_by
from bamboo_core.job.spec import JobSpec
from bamboo_core.orphans import end_with
from bamboo_trainer.task import Parts, Task, Weighted
from bamboo_trainer.tasks.mixed_precision import autocast, passed_on
from bamboo_trainer.tasks.operations import OPERATIONS_PER_BYTE, AllStepsAtOnce, Operations
from bamboo_trainer.tasks.task_errors import TaskError, describe
from bamboo_trainer.tasks.user_code import build_layer, load_batch, run_layer
from bamboo_trainer.training import TrainingConfig

SILENT_SECONDS: Final = 300.0  # a child that sends nothing for this long is given up
MOST_TEXT: Final = 2000  # characters
_FORK: Final = multiprocessing.get_context("fork")

T = TypeVar("T")


def from_child(items: Iterator[T]) -> tuple[list[T], str]:
    """Run an iterator in a forked process; return its items, and the reason if it did not reach its end, else "".

    The result includes all items that the process sent before it failed, ended or fell silent.
    """
    reading, writing = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_send, args=(os.getpid(), items, writing))
    received: list[T] = []
    with reading:
        try:
            with writing:
                child.start()
        except OSError as error:
            return [], f"no process could be started: {said_by(error)}"
        try:
            while reading.poll(SILENT_SECONDS):
                item, end = reading.recv()
                if end is not None:
                    return received, end
                received.append(item)
        except (EOFError, OSError):
            return received, "the process ended without a result"
        finally:
            child.kill()  # it has sent all that it had, or is stuck
            child.join()
    return received, f"no result within {SILENT_SECONDS:g} s"


def _send(parent: int, items: Iterator[object], pipe: Connection) -> None:
    """Send each item, then the error that ended the iterator, or "". Call it in a child right after the fork."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    try:
        for item in items:
            pipe.send((item, None))
        pipe.send((None, ""))
    except BaseException as error:
        pipe.send((None, " ".join(describe(error).split())[:MOST_TEXT]))


_DRAWS: Final = (Tensor.normal_, Tensor.uniform_)


class NoValues(TorchFunctionMode):
    """A mode that skips torch's usual initializations, so that the system need not allocate the tensors' memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def values_wanted() -> bool:
    """Return whether layers need values: False while a layer is built without data, when a factory may skip reading
    files.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, NoValues) for mode in modes):
        return False
    return detect_fake_mode() is None


@contextmanager
def failing_quietly() -> Iterator[None]:
    """Silence torch's log of errors with tensors without data (fake tensors) in this context.

    A traceback there would look like an error of the job, although Bamboo can go on without such a run.
    """
    torchs = logging.getLogger(FakeTensorMode.__module__)
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torchs.setLevel(level)


logger = logging.getLogger(__name__)
# (walk, number of a layer, its inputs) -> finding, and the outputs. Inputs: `Parts`, or a list of them.
Visit = Callable[["Walk", int, Any], tuple[T, Any]]


@dataclass(frozen=True, slots=True)
class Walk:
    """A run of a task's layers: on tensors without data (fake tensors) if `mode` is given, else with data."""

    task: Task
    mode: FakeTensorMode | None = None

    @property
    def within(self) -> AbstractContextManager[object]:
        """The context in which to run a layer."""
        return self.mode or nullcontext()

    @property
    def quickly(self) -> AbstractContextManager[object]:
        """A context in which recurrent layers without data take hardly any time, for counting operations only."""
        return AllStepsAtOnce() if self.mode else nullcontext()

    def layer(self, index: int) -> nn.Module:
        return layer_without_values(self.task, index, self.mode) if self.mode else build_layer(self.task, 0, index)

    def given(self, parts: Any) -> Any:
        """Return these tensors as inputs of the walk's layers: autograd leaves, without data if `mode` is given."""
        return tree_map(self._leaf, parts)

    def _leaf(self, part: Tensor) -> Tensor:
        leaf = part.detach()
        return (self.mode.from_tensor(leaf) if self.mode else leaf).requires_grad_(part.requires_grad)

    def visits(self, visit: Visit[T], inputs: Any, layers: range) -> Iterator[T]:
        """Visit these layers in order; yield each finding. Raises any error of `visit`, such as for lack of data."""
        with failing_quietly():
            parts = self.given(inputs)
            for index in layers:
                seen, parts = visit(self, index, parts)
                yield seen
                parts = tree_map(lambda part: part.detach().requires_grad_(part.requires_grad), parts)


def look(task: Task, inputs: Any, visit: Visit[T]) -> tuple[T, ...]:
    """Visit every layer, without data if possible; return the findings. Raises like `visit`. inputs: the first's."""
    layers = range(len(task.layers))
    seen, problem = look_without_data(task, inputs, visit, layers)
    if not problem:
        return tuple(seen)
    logger.info("the layers are run with data, since %s", problem)
    with torch.random.fork_rng(devices=[]):
        return tuple(Walk(task).visits(visit, inputs, layers))


def look_without_data(task: Task, inputs: Any, visit: Visit[T], layers: range) -> tuple[list[T], str]:
    """Return findings for these layers up to the first that fails without data, and the problem; "" if there is none.

    inputs: the inputs of the first of these layers, with data.
    """
    walk = Walk(task, FakeTensorMode(allow_non_fake_inputs=True))  # created here, because its imports take a second
    return from_child(walk.visits(visit, inputs, layers))


def first_batch(task: Task, samples: int) -> tuple[Parts, Parts]:
    """Return inputs and targets of the first samples of the data, repeated if there are fewer."""
    length = len(task.dataset)
    return load_batch(task, tuple(i % length for i in range(samples)))


def forward(task: Task, config: TrainingConfig, index: int, layer: nn.Module, inputs: Parts) -> Parts:
    """Run a layer in the job's precision; return its outputs as the next layer gets them. index: its number."""
    with autocast(torch.device("cpu"), config.precision):
        outputs = run_layer(layer, index, inputs)
    return outputs if index == len(task.layers) - 1 else passed_on(outputs, config.boundary_dtype)


def layer_without_values(task: Task, index: int, mode: FakeTensorMode) -> nn.Module:
    """Return a layer without data (fake tensors), built without memory if its factory allows that. A factory that reads
    values from a file may not allow it.
    """
    try:
        return build_layer(task, 0, index, mode)
    except Exception as error:
        logger.debug("layer %d is built with its values: %s", index, error)
    layer = build_layer(task, 0, index)
    with mode:
        return layer._apply(mode.from_tensor)  # type: ignore[no-any-return, no-untyped-call]


MOST_COST: Final = 1e24  # limit of the control channel
GRADIENT_TRAFFIC: Final = 3 * 4  # bytes per parameter: reads of a microbatch's gradient and of the sum, and its write


def split_costs(task: Task, spec: JobSpec) -> tuple[float, ...]:
    """Return each layer's cost, by which the coordinator splits the layers into stages; 1 if the split is given."""
    if spec.topology.split is not None:
        return (1.0,) * len(task.layers)
    return layer_costs(task, spec.training.micro_batch_size)


def layer_costs(task: Task, micro_batch_size: int) -> tuple[float, ...]:
    """Return each layer's operations in one microbatch's forward and backward, at least 1, or the task's own costs.

    Operations include memory traffic, converted. Raises TaskError if a layer cannot run, or the costs are invalid.
    """
    if task.costs is not None:
        return stated_costs(task, task.costs)
    inputs, _ = first_batch(task, micro_batch_size)
    return tuple(max(1.0, cost) for cost in look(task, inputs, _cost))


def stated_costs(task: Task, costs: Sequence[float]) -> tuple[float, ...]:
    """Return the costs in `Task.costs`. Raises TaskError unless each layer has a number from 0 to MOST_COST."""
    if isinstance(costs, str) or not isinstance(costs, Sequence) or len(costs) != len(task.layers):
        given = f"{len(costs)}" if isinstance(costs, Sequence) else type(costs).__name__
        raise TaskError(f"Task.costs: expected one number for each of the {len(task.layers)} layers, got {given}")
    for index, cost in enumerate(costs):
        number = isinstance(cost, int | float) and not isinstance(cost, bool)
        if not number or not math.isfinite(cost) or not 0 <= cost <= MOST_COST:
            raise TaskError(f"Task.costs[{index}]: expected a number from 0 to {MOST_COST:g}, got {cost!r}")
    return tuple(map(float, costs))


def _cost(walk: Walk, index: int, inputs: Parts) -> tuple[float, Parts]:
    layer = walk.layer(index)
    with walk.within, walk.quickly, Operations() as operations:
        outputs = run_layer(layer, index, inputs)
        if ends := [p for p in outputs if p.requires_grad]:
            torch.autograd.backward(ends, [torch.empty_like(p) for p in ends])
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return float(operations.total + OPERATIONS_PER_BYTE * GRADIENT_TRAFFIC * trained), outputs


@dataclass(slots=True)
class Draws:
    """The random number generators (Python's, numpy's) from which several runs of a layer have drawn.

    A generator counts even if its numbers make no difference in these runs, as for a layer that is skipped one time in
    ten. quiet: makes a context in which no other thread reads data, as all threads share numpy's generator.
    """

    quiet: Callable[[], AbstractContextManager[None]]
    runs: list[set[str]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record numpy's generator if its state changes; unless profiled, Python's if this thread draws unseeded."""
        generators: set[str] = set()
        seeded = False

        def called(_frame: object, event: str, function: Any) -> None:
            nonlocal seeded
            if event != "c_call" or getattr(function, "__self__", None) is not _GLOBAL:
                return
            seeded = seeded or function.__name__ in ("seed", "setstate")
            if not seeded and function.__name__ in ("random", "getrandbits"):
                generators.add("Python's random")

        with self.quiet():
            before, profiled = _numpy_state(), sys.getprofile() is not None
            if not profiled:  # whoever profiles a worker keeps the profiler; some cannot be set again
                sys.setprofile(called)
            try:
                yield
            finally:
                if not profiled:
                    sys.setprofile(None)
            if _numpy_state() != before:
                generators.add("numpy.random")
            self.runs.append(generators)

    def each_time(self) -> str:
        """Return the names of the generators recorded in every run, joined by "and"; "" if there is none. A run that
        leaves numpy's state unchanged, as by seeding it like the run just before it, does not record numpy's.
        """
        return " and ".join(sorted(set.intersection(*self.runs))) if self.runs else ""


_GLOBAL: Final = getattr(random.random, "__self__", None)  # the generator behind the module's functions


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return pickle.dumps(numpy.get_state(legacy=False))


SAMPLES: Final = 2
DRAWS: Final = 3  # compared draws of made-up outputs, for each order of the samples
MOST_VALUES: Final = 1 << 24  # in the outputs for two samples: the loss of larger ones would take too long


def require_all_samples(task: Task, forms: Parts, targets: Parts) -> None:
    """Raise TaskError if the loss seems to depend only on the first or the last sample of a microbatch.

    The loss is computed from made-up outputs for two samples, in both orders of their targets. It is refused if it
    always follows one sample's outputs and never the other's. A loss that cannot be tried is accepted.

    forms: tensors with the shapes and dtypes of the last layer's outputs; their values are not used.
    """
    samples = min((len(part) for part in (*forms, *targets) if part.dim()), default=0)
    rows = all(part.dim() and len(part) == samples for part in (*forms, *targets))
    if samples < SAMPLES or not rows or sum(part[:SAMPLES].numel() for part in forms) > MOST_VALUES:
        return
    followed: set[str | None] = {None}
    with suppress(Exception), torch.no_grad():  # the loss may not accept made-up outputs
        followed = {_followed_alone(task, *made) for made in _made(forms, targets)}
    if None not in followed and len(followed) == 1:
        raise TaskError(
            f"the loss depends on the {followed.pop()} sample of a microbatch alone: expected the mean over all "
            "samples (outputs and targets are tuples of tensors; outputs[0] has all samples, outputs[0][0] only one)"
        )


def _made(forms: Parts, targets: Parts) -> Iterator[tuple[Parts, Parts, Parts]]:
    """Yield two sets of made-up outputs for two samples, and targets: DRAWS times for each order of the targets."""
    draw = torch.Generator().manual_seed(0)

    def outputs() -> Parts:
        drawn = [torch.randn((SAMPLES, *part.shape[1:]), generator=draw) for part in forms]
        return tuple(d if p.is_floating_point() else d.to(p.dtype) for d, p in zip(drawn, forms, strict=True))

    for order in ([0, 1], [1, 0]):
        for _ in range(DRAWS):
            yield outputs(), outputs(), tuple(part[order] for part in targets)


def _followed_alone(task: Task, outputs: Parts, others: Parts, targets: Parts) -> str | None:
    """Return "first" or "last" if the loss follows the outputs of only that sample, else None."""
    value = _total(task, outputs, targets)
    without_last = tuple(torch.cat([a[:1], b[1:]]) for a, b in zip(outputs, others, strict=True))
    without_first = tuple(torch.cat([b[:1], a[1:]]) for a, b in zip(outputs, others, strict=True))
    changes = [not torch.equal(value, _total(task, made, targets)) for made in (without_first, without_last)]
    return {(True, False): "first", (False, True): "last"}.get((changes[0], changes[1]))


def _total(task: Task, outputs: Parts, targets: Parts) -> Tensor:
    given = task.loss(outputs, targets)
    return given.total if isinstance(given, Weighted) else given
