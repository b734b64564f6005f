"""Copies of layers' states, made piece by piece while training continues.

Parameters and the optimizer's tensors change only with the next optimizer step, so until then a piece may be copied
whenever the worker waits for others. Tensors that a forward may change are copied at once.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from bamboo_trainer.stage.state.layer_state import LayerState

PIECE_BYTES: Final = 16 << 20  # a few milliseconds


class Copying(Protocol):
    """Copies in progress. layers: complete when done."""

    @property
    def layers(self) -> Mapping[int, LayerState]: ...

    @property
    def done(self) -> bool: ...

    def copy_piece(self) -> None:
        """Copy the next piece; must be called before the state changes."""
        ...


class LateCopies:
    """Copies of tensors of these kinds, which the stage holds until they are copied. layers: the states."""

    KINDS: Final = ("parameter:", "state:")

    def __init__(self, layers: Mapping[int, LayerState]) -> None:
        self._layers = layers
        self._pieces: deque[tuple[Tensor, Tensor]] = deque()  # from, to
        for state in layers.values():
            assert isinstance(state.tensors, dict)
            for name, tensor in state.tensors.items():
                if name.startswith(self.KINDS):
                    state.tensors[name] = self._later(tensor.detach())

    def _later(self, source: Tensor) -> Tensor:
        """Return the tensor that the copy will fill."""
        if not source.is_contiguous() or source.layout is not torch.strided:
            return source.to("cpu", copy=True)
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        (here, target), length = (source.view(-1), copy.view(-1)), PIECE_BYTES // source.element_size()
        self._pieces.extend((here[i : i + length], target[i : i + length]) for i in range(0, here.numel(), length))
        return copy

    @property
    def layers(self) -> Mapping[int, LayerState]:
        return self._layers

    @property
    def done(self) -> bool:
        return not self._pieces

    def copy_piece(self) -> None:
        source, copy = self._pieces.popleft()
        copy.copy_(source)
