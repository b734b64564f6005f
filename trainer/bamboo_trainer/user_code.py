"""Calls into the user's task: each answer is checked, and what is wrong becomes one sentence, a TaskError.

Running out of memory is nobody's mistake and passes as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import pure_seed
from bamboo_trainer.task import Parts, Task


class TaskError(ValueError):
    """The user's task did what a task may not do; the message says which part of it and what."""


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def build_layer(task: Task, seed: int, layer: int) -> nn.Module:
    """One layer; its values are a pure function of (seed, layer). Leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(pure_seed("init", seed, layer))
        try:
            module = task.layers[layer]()
        except Exception as error:
            raise TaskError(f"building layer {layer} failed: {told(error)}") from error
    if not isinstance(module, nn.Module):
        raise TaskError(f"the factory of layer {layer} returned {type(module).__name__}, expected a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise TaskError(f"parameter {layer}.{name} is {parameter.dtype}, expected torch.float32")
    return module


def run_layer(task_layer: nn.Module, layer: int, parts: Parts, call: Callable[[Any], Any] | None = None) -> Parts:
    """Gives the layer its one tensor, or a tuple of several; what it raises becomes a TaskError.

    call: calls it in another way than just so.
    """
    try:
        result = (call or task_layer)(parts[0] if len(parts) == 1 else parts)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise TaskError(f"layer {layer} ({type(task_layer).__name__}) raised {told(error)}") from error
    result = (result,) if isinstance(result, Tensor) else result
    if not isinstance(result, tuple) or not result or not all(isinstance(p, Tensor) for p in result):
        raise TaskError(
            f"layer {layer} ({type(task_layer).__name__}) must return a tensor or a tuple of tensors, "
            f"not {type(result).__name__}"
        )
    return result


def forward_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """What the global generator is seeded with right before a layer's forward (dropout)."""
    return pure_seed("forward", seed, step, microbatch, layer)


def seed_forward(device: torch.device, seed: int) -> None:
    """Set the state of the generators that a forward on that device may draw from.

    NB: `torch.manual_seed` does the same and much more; it takes longer than a small layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def task_loss(task: Task, outputs: Parts, targets: Parts) -> Tensor:
    """The loss in fp32, checked to be a scalar that depends on the model."""
    outputs = tuple(p.float() if p.is_floating_point() else p for p in outputs)
    try:
        loss = task.loss(outputs, targets)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise TaskError(f"the loss raised {told(error)}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TaskError("the loss must be a scalar tensor")
    if not loss.requires_grad:
        raise TaskError("the loss does not depend on any parameter or input that requires a gradient")
    return loss.reshape(())


def load_batch(task: Task, indices: Sequence[int]) -> tuple[Parts, Parts]:
    """The dataset's answer for these samples; anything it raises becomes a TaskError."""
    try:
        return task.dataset.batch(indices)
    except Exception as error:
        raise TaskError(f"the dataset raised {told(error)} for samples {list(indices)[:8]}") from error


@contextmanager
def unchanged_buffers(layers: Mapping[int, nn.Module]) -> Iterator[None]:
    """Around a forward: TaskError if it changed a buffer of these layers, by layer number."""
    before = _buffer_copies(layers)
    yield
    after = _buffer_copies(layers)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None or not _same_bits(old, new):
            layer, _, buffer = name.partition(".")
            raise TaskError(
                f"layer {layer} ({type(layers[int(layer)]).__name__}) changes its buffer {buffer!r} "
                "in the forward, so a repeated forward would differ "
                "(use LayerNorm or GroupNorm instead of BatchNorm)"
            )


def _buffer_copies(layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": buffer.detach().clone()
        for index, layer in layers.items()
        for name, buffer in layer.named_buffers()
    }


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
