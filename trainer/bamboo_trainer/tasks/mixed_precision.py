"""Products in bfloat16 or float16 with parameters in fp32: `torch.autocast`, with parameters cast once a step.

`torch.autocast` forgets its casts at its end, so every microbatch in flight would keep a copy of all weights for its
backward. Here they stay until a parameter changes. The gradient of a cast is cast back for each microbatch by itself,
so the bits are the same.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bamboo_trainer.task import Parts

# What `training.precision` calls them; fp32 is no product of a cast.
REDUCED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


# Their weights are few, and their kernels want them in fp32 if the input is.
_NORMS: Final = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kept_in_fp32(layer: nn.Module) -> set[int]:
    """The ids of the layer's parameters that are not rounded, whatever `training.parameterPrecision` is."""
    return {id(p) for module in layer.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Autocast as torch has it; entered per layer, so a parameter that two layers share is cast for each of them."""
    dtype = REDUCED.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


@contextmanager
def autocast_and_keep(device: torch.device, precision: str) -> Iterator[None]:
    """Autocast in one of the reduced precisions, in which what was cast is found again next time, until
    `forget_casts`.
    """
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


def passed_on(result: Any, dtype: torch.dtype) -> Any:
    """What a layer gives to the next one, rounded to that type: of its tensors those in fp32 that have a gradient.

    Every layer but the last one does it, and not only those that another worker follows: the bits then do not depend on
    where the model is split. Its gradient is rounded alike, by autograd. What has none, as masks and angles, stays as
    it is: it is small, and the least number of fp32 would become infinite.
    """
    if dtype is torch.float32:
        return result
    if isinstance(result, Tensor):
        return result.to(dtype) if result.requires_grad and result.dtype is torch.float32 else result
    return tuple(passed_on(part, dtype) for part in result) if isinstance(result, tuple) else result


def as_passed_on(parts: Parts) -> Parts:
    """What a layer is given, as it is behind another layer: no leaf, as the inputs of a stage are.

    autocast keeps the cast of a leaf, as if it were a parameter. The gradients of its uses would be summed in 16 bits,
    which those of what a layer in the same stage has passed on are not; and the cast would stay until `forget_casts`.
    A layer may use autocast itself, so that this is so whatever the job's precision is.
    """
    return tuple([part.view_as(part) if part.requires_grad and part.is_leaf else part for part in parts])


class keep_casts:
    """A block for a backward in which layers are run again: torch then enters and leaves autocast by itself.

    What runs in another thread, as a backward on a GPU does, is not kept from forgetting them; they come again.
    """

    def __enter__(self) -> None:
        torch.autocast_increment_nesting()

    def __exit__(self, *_: object) -> None:
        torch.autocast_decrement_nesting()


def forget_casts() -> None:
    """Forgets what was cast; to be called whenever a parameter has changed."""
    torch.clear_autocast_cache()
