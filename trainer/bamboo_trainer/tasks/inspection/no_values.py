"""Building layers to look at them, not to train them: then nobody needs their first values."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_DRAWS: Final = (Tensor.normal_, Tensor.uniform_)


class NoValues(TorchFunctionMode):
    """Leaves out what gives parameters their first values. Memory that nobody writes to is not even taken."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def values_wanted() -> bool:
    """False while a layer is built that is only looked at. A factory that reads files may then leave that out."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, NoValues) for mode in modes):
        return False
    return detect_fake_mode() is None


@contextmanager
def failing_quietly() -> Iterator[None]:
    """A block for what is tried on tensors without data, and done with data if that fails: torch prints a traceback of
    its own before it raises, which would look like an error of the job.
    """
    torchs = logging.getLogger(FakeTensorMode.__module__)
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torchs.setLevel(level)
