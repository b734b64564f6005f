"""Building layers to inspect them, without the initial values that only training needs."""

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
    """A mode that skips the initialization of parameters. Memory without writes is not even allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def values_wanted() -> bool:
    """Return False while a layer is built only for inspection. A factory that reads files may then skip that."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, NoValues) for mode in modes):
        return False
    return detect_fake_mode() is None


@contextmanager
def failing_quietly() -> Iterator[None]:
    """Silence torch's own traceback while layers are tried without data; if that fails, they run with data.

    The traceback would look like an error of the job.
    """
    torchs = logging.getLogger(FakeTensorMode.__module__)
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torchs.setLevel(level)
