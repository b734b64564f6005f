"""Mixed precision: `torch.autocast` to bfloat16 or float16, which casts parameters in fp32 once a step.

`torch.autocast` forgets its casts at its end, so every microbatch in flight would keep a copy of all weights for its
backward. Here casts stay until a parameter changes. Each microbatch casts a cast's gradient back separately, so the
bits are the same as in plain autocast; and at once, so that no backward holds all casts' gradients in 16 bits.

A checkpointed layer keeps no casts for its backward. It runs in plain autocast, whose end forgets all casts of the
stage. torch forgets them anyway when a backward has repeated such a layer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase

from bamboo_trainer.task import Parts

# By the names of `training.precision`; fp32 needs no casts.
REDUCED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Autograd's names of the operations of a backward that add to a parameter's gradient, and that undo a cast.
LEAF: Final = "torch::autograd::AccumulateGrad"
CAST: Final = "ToCopyBackward0"
_AT_ONCE: Final = 2**64 - 2  # autograd's own number of LEAF is one more
_layers: Final = WeakSet[nn.Module]()  # layers whose casts have that number

# Norms have few weights, and their kernels want these in fp32 if the input is in fp32.
_NORMS: Final = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kept_in_fp32(layer: nn.Module) -> set[int]:
    """Return the id() of each parameter of a norm. They stay in fp32 with any `training.parameterPrecision`."""
    return {id(p) for module in layer.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)}


def rounded(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace a layer's parameters, except norms', by copies in `dtype`; return the layer. Shared ones stay shared."""
    made, precise = dict[int, nn.Parameter](), kept_in_fp32(layer)
    for module in layer.modules() if dtype is not torch.float32 else ():
        for name, own in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(own) not in precise:
                made.setdefault(id(own), nn.Parameter(own.detach().to(dtype), requires_grad=own.requires_grad))
                setattr(module, name, made[id(own)])
    return layer


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return torch's autocast context; for fp32, a context without effect. Enter it for each layer, so that a
    parameter of two layers is cast for each of them.
    """
    dtype = REDUCED.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


@contextmanager
def autocast_and_keep(device: torch.device, precision: str) -> Iterator[None]:
    """Autocast to a reduced precision in this context, but keep the casts after it, until `forget_casts`."""
    kind, reduced = device.type, REDUCED[precision]
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, reduced)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()  # autocast's own end would now empty the cache
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, enabled)


def cast_back_at_once(layer: nn.Module, given: Any, result: Any) -> None:
    """Make each backward cast the gradients of the layer's casts back as soon as it has them.

    Call it after every forward of the layer, with its inputs and result. The first forward after `forget_casts` makes
    the casts. Of the operations that are ready, a backward runs the one with the highest number, the newest one. A cast
    that later microbatches reuse is older than all their other operations: its gradient would wait until the backward
    has come to the first layer.
    """
    if layer in _layers:
        return
    _layers.add(layer)
    seen = {None, *_nodes(given)}
    left = [node for node in _nodes(result) if node not in seen]
    while left:
        node: Any = left.pop()
        if node.name() == CAST and (after := node.next_functions[0][0]) and after.name() == LEAF:
            node._set_sequence_nr(_AT_ONCE)
        following = {after for after, _ in node.next_functions} - seen
        seen |= following
        left += following


def _nodes(parts: Any) -> list[Node | None]:
    return [part.grad_fn for part in (parts if isinstance(parts, tuple) else (parts,)) if isinstance(part, Tensor)]


def passed_on(result: Any, dtype: torch.dtype) -> Any:
    """Return a layer's result as it is passed on: its fp32 tensors that require a gradient are rounded to `dtype`.

    The results of all layers but the last are rounded, not only at a boundary between workers: the bits then do not
    depend on the split. Autograd rounds the gradients to `dtype`, too. Tensors without a gradient, such as masks and
    angles, stay unchanged: they are small, and a mask's lowest fp32 number would become infinite.
    """
    if dtype is torch.float32:
        return result
    if isinstance(result, Tensor):
        return result.to(dtype) if result.requires_grad and result.dtype is torch.float32 else result
    return tuple(passed_on(part, dtype) for part in result) if isinstance(result, tuple) else result


def as_passed_on(parts: Parts) -> Parts:
    """Return a layer's inputs, each leaf that requires a gradient replaced by a view of it, which is no leaf.

    autocast keeps the cast of a leaf, as if it were a parameter. The gradients of its uses would be summed in 16 bits,
    unlike the gradients of a tensor passed on within the stage; and the cast would stay until `forget_casts`. A layer
    may use autocast itself, so call this with any precision of the job.
    """
    return tuple([part.view_as(part) if part.requires_grad and part.is_leaf else part for part in parts])


def forget_casts() -> None:
    """Forget all casts; call it whenever a parameter has changed."""
    torch.clear_autocast_cache()
    _layers.clear()
