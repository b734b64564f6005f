"""Calls into the user's task with checks: a mistake of the task raises TaskError with a message for the user.

A call that runs out of memory raises TaskOutOfMemory instead: this is no mistake of the task.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bamboo_core.control.protocol import MOST_METRICS
from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.frames import MOST_DECISIONS, unsendable
from bamboo_trainer.task import Dataset, Parts, Sum, Task, checked_name, parted, sum_and_weight
from bamboo_trainer.tasks.running_buffers import spectrally_normed
from bamboo_trainer.tasks.task_errors import TaskError, blamed, in_task, is_an_error, ran_out_of_memory

_AS_IT_IS: Final = nullcontext()
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_VERSION: Final = attrgetter("_version")


def build_layer(task: Task, seed: int, layer: int, within: AbstractContextManager[object] = _AS_IT_IS) -> nn.Module:
    """Build one layer, with torch's generators seeded from (seed, layer). Then restore the CPU's generator only.

    within: a context for the factory. Raises TaskError, also if Bamboo cannot train the layer, and TaskOutOfMemory.
    """
    with torch.random.fork_rng(devices=[]):
        _seed_all(pure_seed("init", seed, layer))
        factory = layer_factory(task, layer)
        with in_task(f"the factory of layer {layer}"), within:
            module = factory()
    if not isinstance(module, nn.Module):
        raise TaskError(f"the factory of layer {layer} returned {type(module).__name__}, expected a torch.nn.Module")
    for name, parameter in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(parameter):
            raise TaskError(
                f"{layer}.{name} has no shape yet: a lazy module learns it in its first forward, and the layers are "
                "split and copied before that; give the module its sizes"
            )
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise TaskError(f"parameter {layer}.{name} is {parameter.dtype}, expected torch.float32")
    if normed := spectrally_normed(module):
        raise TaskError(
            f"{named_layer(module, layer)} has spectral_norm on {normed!r}, which updates its vectors in each forward, "
            "so a repeated forward would differ: use torch.nn.utils.parametrizations.orthogonal or weight_norm, or put "
            "it in eval mode"
        )
    return module


def _seed_all(seed: int) -> None:
    """Seed torch's generators: all of them, or the CPU's alone if torch is built for no accelerator.

    Without an accelerator, `torch.manual_seed` would record its call stack as text for several kinds of accelerators,
    which takes longer than making a small layer.
    """
    if torch.accelerator.current_accelerator() is None:  # of this build of torch; no device is touched
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def layer_factory(task: Task, layer: int) -> Callable[[], nn.Module]:
    """Return the function that creates a layer. Raises TaskError if the task has an nn.Module in its place, or anything
    that is not callable.
    """
    factory = task.layers[layer]
    if isinstance(factory, nn.Module):
        raise TaskError(
            f"layers[{layer}] is a module ({type(factory).__name__}), expected a function without arguments that makes "
            "one, such as `lambda: nn.Linear(8, 8)`: each worker makes only the layers that it holds"
        )
    if not callable(factory):
        raise TaskError(f"layers[{layer}] is of type {type(factory).__name__}, expected a function that makes a module")
    return factory


def call_layer(task_layer: nn.Module, given: Any) -> Any:
    """Call a layer. given: its inputs, a tensor or a tuple of tensors (see `arguments`)."""
    return task_layer(*arguments(task_layer, given))


def arguments(task_layer: nn.Module, given: Any) -> tuple[Any, ...]:
    """Return a layer's arguments: a tuple's items if its `forward` takes several by position, else `given` alone."""
    if not isinstance(given, tuple):
        return (given,)
    takes_several = _TAKE_SEVERAL.get(task_layer)
    if takes_several is None:
        takes_several = _TAKE_SEVERAL[task_layer] = _takes_several(task_layer.forward)
    return given if takes_several else (given,)


_TAKE_SEVERAL: Final[WeakKeyDictionary[nn.Module, bool]] = WeakKeyDictionary()  # inspecting is slow


def _takes_several(forward: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return False  # unknown
    places = [p.kind for p in parameters if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD]
    return len(places) > 1 or inspect.Parameter.VAR_POSITIONAL in places


def run_layer(
    task_layer: nn.Module,
    layer: int,
    parts: Parts,
    call: Callable[[Any], Any] | None = None,
    *,
    ends_stage: bool = False,
) -> Parts:
    """Run a user's layer forward and return its checked result, as contiguous tensors. parts: the layer's inputs.

    call: called instead of `call_layer`. ends_stage: the layer is its stage's last; then its result gets no hooks (see
    `_in_one_layout`). Raises TaskOutOfMemory if the layer runs out of memory; TaskError for its other errors, if torch
    counts a write to its inputs, or if its result is not one or several real tensors that can be sent.
    """
    call, before = call or partial(call_layer, task_layer), _versions(parts)
    try:
        result = call(parts[0] if len(parts) == 1 else parts)
    except TaskError:
        raise
    except BaseException as error:
        if not is_an_error(error):
            raise
        may_repeat = isinstance(error, Exception) and not ran_out_of_memory(error)
        if may_repeat and _would_write(call, parts):
            raise TaskError(f"{named_layer(task_layer, layer)} {_WRITES}") from error
        raise blamed(named_layer(task_layer, layer), error) from error
    if _versions(parts) != before:
        raise TaskError(f"{named_layer(task_layer, layer)} {_WRITES}")
    if isinstance(result, Tensor):
        result = (result,)
    elif not isinstance(result, tuple) or not result or not all(isinstance(p, Tensor) for p in result):
        raise TaskError(
            f"{named_layer(task_layer, layer)} must return a tensor or a tuple of tensors, not {type(result).__name__}"
        )
    for part in result:
        if wrong := unsendable(part, real=True):
            raise TaskError(f"{named_layer(task_layer, layer)} returned a tensor of {wrong}")
    who = named_layer(task_layer, layer)
    return _in_one_layout(_with_own_gradients(parts, result), hooked=not ends_stage, who=who)


def _with_own_gradients(parts: Parts, result: Parts) -> Parts:
    """Return a layer's result, with views in place of parts that need gradients and are also inputs or earlier parts.
    Each use then has its own gradient, as between stages; else the order of the sums would depend on the split.
    """
    if len(parts) == len(result) == 1 and parts[0] is not result[0]:
        return result  # nearly always
    seen, separate = {id(part) for part in parts}, []
    for part in result:
        separate.append(part.view_as(part) if part.requires_grad and id(part) in seen else part)
        seen.add(id(part))
    return tuple(separate)


def _in_one_layout(parts: Parts, *, hooked: bool, who: str) -> Parts:
    """Return contiguous parts, like parts from another worker; if `hooked`, let hooks make the gradients of non-leaf
    parts contiguous, too. Bits may depend on strides, but must not depend on the split. who: the layer's name.
    """
    parts = tuple([part.contiguous() for part in parts])
    passed = [part for part in parts if part.requires_grad and not part.is_leaf] if hooked else []
    without = set[int]()
    for number, part in enumerate(passed):
        part.register_hook(partial(_contiguous, number, len(passed), without, who if _is_compiled(part) else ""))  # type: ignore[no-untyped-call]
    return parts


def _contiguous(number: int, count: int, without: set[int], compiled: str, gradient: Tensor | None) -> Tensor | None:
    """Return the contiguous gradient of a part of a layer's result; None if no gradient reaches the part.

    Raises TaskError if a compiled layer gets no gradient at all: it would treat None as zeros, and its parameters would
    count as used. number: the part's index among the `count` parts with hooks. without: indices of the parts without
    gradient so far; extended here. compiled: the layer's name if a compiled graph returned the part, else "".
    """
    if gradient is not None:
        return gradient.contiguous()
    without.add(number)
    if compiled and len(without) == count:
        raise TaskError(
            f"{compiled} is compiled (training.compile), and no gradient reaches it, since the next layer detaches "
            "what it takes: freeze it, or leave its forward to Python by @torch.compiler.disable"
        )
    return None


def _is_compiled(part: Tensor) -> bool:
    """Return whether the node that made a tensor, in its autograd graph, is a graph compiled by torch.compile."""
    return type(part.grad_fn).__name__ == COMPILED_NODE


def named_layer(task_layer: nn.Module, layer: int) -> str:
    return f"layer {layer} ({type(task_layer).__name__})"


COMPILED_NODE: Final = "CompiledFunctionBackward"  # torch's class of the node of a compiled graph
_WRITES: Final = (
    "writes to its inputs, which a layer may not do: others still need them "
    "(let torch's own layers have inplace=False, or write to a copy)"
)


def _versions(parts: Parts) -> list[int]:
    """Return the tensors' version counters, by which torch counts in-place writes; 0 for inference tensors."""
    try:
        return list(map(_VERSION, parts))
    except RuntimeError:  # inference tensors are not counted
        return [0 if part.is_inference() else part._version for part in parts]


def _would_write(call: Callable[[Any], Any], parts: Parts) -> bool:
    """Repeat a failed call with copies of its inputs; return whether the call writes to the copies. The first call may
    have failed because of such a write: torch refuses it for an autograd leaf that requires a gradient.
    """
    copies = tuple(part.clone() for part in parts)
    before = _versions(copies)
    with suppress(Exception):  # its first error is the one that is reported
        call(copies[0] if len(copies) == 1 else copies)
    return _versions(copies) != before


def dataset_length(task: Task, dataset: Dataset | None = None) -> int:
    """Return the length of a dataset, at least 1. dataset: None for the training dataset. Raises TaskError."""
    asked = task.dataset if dataset is None else dataset
    check_dataset(asked)
    return length_of(asked)


def length_of(dataset: Sized) -> int:
    """Return the length of a dataset, at least 1. Raises TaskError."""
    with in_task("the dataset, asked for its length,"):
        length = len(dataset)
    if length < 1:
        raise TaskError("the dataset is empty")
    return length


def check_dataset(dataset: object) -> None:
    """Raise TaskError if a dataset, such as one of torch.utils.data with single samples, has no `batch` method."""
    if callable(getattr(dataset, "batch", None)):
        return
    problem = f"the dataset: expected len() and batch(indices), and {type(dataset).__name__} has no batch"
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    raise TaskError(problem + ("; bamboo_trainer.data.Indexed makes one of it" if by_number else ""))


def forward_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of torch's global generators for a layer's forward in training, which may draw from them."""
    return pure_seed("forward", seed, step, microbatch, layer)


def seed_forward(device: torch.device, seed: int) -> None:
    """Seed torch's global generators for a forward on `device`: the CPU's and, for a GPU, that GPU's.

    `torch.manual_seed` does more than that, and can take longer than a small layer's forward.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):  # a worker with several devices may have another current one
            torch.cuda.manual_seed(seed)


class Loss(NamedTuple):
    """The loss of a microbatch, and its weight."""

    total: Tensor
    weight: float | None  # None if total is a mean


def task_loss(task: Task, outputs: Parts, targets: Parts) -> Loss:
    """Compute a microbatch's loss and its weight, from the outputs in fp32. Raises TaskError if the task's loss fails,
    is invalid, or needs no gradient although its weight is not 0; TaskOutOfMemory.
    """
    outputs = _in_fp32(outputs)
    with in_task("the loss"):
        given = task.loss(outputs, targets)
    loss, weight = parted(given, "the loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TaskError("the loss must be a scalar tensor, or Weighted with a scalar tensor as its total")
    if not loss.requires_grad and weight != 0:
        raise TaskError("the loss does not depend on any parameter or input that requires a gradient")
    return Loss(loss.reshape(()), weight)


def check_functions(task: Task) -> None:
    """Raise TaskError for an invalid name or value in metrics, decisions or callbacks, or too many of the first two."""
    fields = {
        "metrics": (task.metrics, MOST_METRICS),
        "decisions": (task.decisions, MOST_DECISIONS),
        "callbacks": (task.callbacks, math.inf),
    }
    for field, (given, most) in fields.items():
        if not isinstance(given, Mapping) or not all(map(callable, given.values())):
            raise TaskError(f"Task.{field}: expected functions by name, got {_form(given)}")
        if len(given) > most:
            raise TaskError(f"Task.{field}: {len(given)} {field}, at most {most} are accepted")
        for name in given:
            if field == "metrics":
                checked_name(name, "Task.metrics: a name")
            elif not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
                raise TaskError(f"Task.{field}: a name is {name!r}, expected letters, digits, _ and - (at most 40)")


def task_metrics(task: Task, outputs: Parts, targets: Parts) -> dict[str, Sum]:
    """Return the sum and the weight of each metric of a microbatch; a mean's weight is 1. Raises TaskError."""
    if not task.metrics:
        return {}
    sums, outputs = {}, _in_fp32(p.detach() for p in outputs)
    for name, metric in task.metrics.items():
        with torch.no_grad(), in_task(f"metric {name!r}"):
            value = metric(outputs, targets)
        sums[name] = sum_and_weight(name, value, 1)
    return sums


def _in_fp32(parts: Iterable[Tensor]) -> Parts:
    return tuple(p.float() if p.is_floating_point() else p for p in parts)


def load_batch(task: Task, indices: Sequence[int], dataset: Dataset | None = None) -> tuple[Parts, Parts]:
    """Return the inputs and targets of these samples. dataset: None for the training dataset.

    Raises TaskOutOfMemory; TaskError for other errors of the dataset, or if a batch is not two tuples of tensors.
    """
    with in_task(f"the dataset, asked for samples {list(indices)[:8]},"):
        batch = (task.dataset if dataset is None else dataset).batch(indices)
    if not isinstance(batch, tuple) or len(batch) != 2 or not all(_is_parts(parts) for parts in batch):
        raise TaskError(
            f"the dataset returned {_form(batch)} for samples {list(indices)[:8]}, "
            "expected (inputs, targets), two tuples of tensors"
        )
    return batch


def _is_parts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value)


def _form(value: object) -> str:
    """Return the type of a value in words, with the types of the items of a tuple or list."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return type(value).__name__


@contextmanager
def no_new_parameters(layers: Mapping[int, nn.Module]) -> Iterator[None]:
    """Raise TaskError at the end of this context if one of these layers (by index) has a new or replaced parameter."""
    before = {index: dict(layer.named_parameters()) for index, layer in layers.items()}
    yield
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if before[index].get(name) is not parameter:
                raise new_parameter(layer, index, name)


def new_parameter(task_layer: nn.Module, layer: int, name: str) -> TaskError:
    """Return the error for a parameter that a forward has made."""
    return TaskError(
        f"{named_layer(task_layer, layer)} makes its parameter {name!r} in the forward, after the layers were "
        "split and given to the optimizer; make it in the constructor"
    )


@contextmanager
def unchanged_buffers(layers: Mapping[int, nn.Module]) -> Iterator[None]:
    """Raise TaskError at the end of this context if a forward in it has changed a buffer of these layers (by index)."""
    before = _buffer_copies(layers)
    yield
    after = _buffer_copies(layers)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None or not same_bits(old, new):
            layer, _, buffer = name.partition(".")
            raise changed_buffer(layers[int(layer)], int(layer), buffer)


def changed_buffer(task_layer: nn.Module, layer: int, name: str, kind: str = "buffer") -> TaskError:
    """Return the error for a tensor that a forward has changed. kind: the tensor's kind, for the message."""
    return TaskError(
        f"{named_layer(task_layer, layer)} changes its {kind} {name!r} in the forward, "
        "so a repeated forward would differ"
    )


def _buffer_copies(layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": buffer.detach().clone()
        for index, layer in layers.items()
        for name, buffer in layer.named_buffers()
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors on one device have the same shape, dtype and bits; NaNs can be equal, too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def tokens_of(task: Task) -> int | None:
    """Return the number of tokens in a sample that the task, or else its dataset, states; None without a valid one."""
    tokens = task.tokens_per_sample or getattr(task.dataset, "tokens_per_sample", None)
    return tokens if type(tokens) is int and tokens > 0 else None
