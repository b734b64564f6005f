"""Results of a layer's forward in addition to its outputs: what norms see, and losses of its own."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, nn

Parts = tuple[Tensor, ...]
Contributed = list[tuple[nn.Module, Parts]]  # in order


@dataclass(slots=True)
class Capture:
    """The means and variances of the batches that norms have seen, and losses, in order."""

    # fill, count, momentum: BatchNorm's running statistics, number of batches and momentum meanwhile; momentum is 1,
    # or 0.5 with a fill of 0. Neither contributions nor outputs may depend on them.
    fill: float = 1.0
    count: int = 0
    momentum: float = 1.0
    contributed: Contributed = field(default_factory=list)
    losses: list[tuple[str, Tensor]] = field(default_factory=list)
    _closed: bool = False

    def contribute(self, module: nn.Module, given: Parts) -> None:
        if not self._closed:
            self.contributed.append((module, given))

    def add_loss(self, name: str, value: Tensor) -> None:
        if not self._closed:
            self.losses.append((name, value))

    def close(self) -> None:
        """End the forward; ignore what its repetition in the backward produces."""
        self._closed = True


_CAPTURE: Final[ContextVar[Capture | None]] = ContextVar("capture", default=None)


def current() -> Capture | None:
    return _CAPTURE.get()


class capturing:
    """A context in which a forward is captured."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __enter__(self) -> None:
        self._token = _CAPTURE.set(self._capture)

    def __exit__(self, *_: object) -> None:
        _CAPTURE.reset(self._token)
