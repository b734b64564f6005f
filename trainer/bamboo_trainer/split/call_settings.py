"""The settings around the calls of a model's blocks in its forward: autocast, and whether gradients are computed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from bamboo_trainer.split.structures import CannotSplit

_DEVICE_TYPES: Final = ("cpu", "cuda")
_ATTENTION: Final[tuple[Callable[[], bool], ...]] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings of a block's call, where they differ from the settings of the model's call."""

    # device types, each with whether it is on and with its dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    gradients: bool | None = None  # None if they are as around the model


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The settings of this thread."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    nesting: int  # of autocast
    gradients: bool
    others: tuple[tuple[str, Any], ...]  # settings that cannot be set again, by name


def surroundings() -> Surroundings:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return Surroundings(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES),
        nesting,
        torch.is_grad_enabled(),
        (
            ("torch.inference_mode", torch.is_inference_mode_enabled()),
            ("torch.set_default_dtype", torch.get_default_dtype()),
            ("torch.nn.attention.sdpa_kernel", tuple(enabled() for enabled in _ATTENTION)),
        ),
    )


def settings_of(name: str, outside: Surroundings, inside: Surroundings) -> CallSettings:
    """Return the settings of a block's call. outside: around the model's forward; inside: around the call.

    Raises CannotSplit for a setting that a layer cannot set again.
    """
    for (what, before), (_, now) in zip(outside.others, inside.others, strict=True):
        if before != now:
            raise CannotSplit(f"the model's forward calls {name} with {what} around it: use it within the block")
    differing = tuple(now for before, now in zip(outside.autocast, inside.autocast, strict=True) if before != now)
    if not differing and inside.nesting > outside.nesting:
        differing = inside.autocast  # such as enabled=False, which matters where the job's precision turns it on
    return CallSettings(differing, None if inside.gradients == outside.gradients else inside.gradients)


@contextmanager
def around(settings: CallSettings) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, enabled, dtype in settings.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        if settings.gradients is not None:
            stack.enter_context(torch.set_grad_enabled(settings.gradients))
        yield
