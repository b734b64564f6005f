"""Copies of layers' states that are made piece by piece after the state was reached, while training goes on.

Parameters and the optimizer's tensors change only with the next optimizer step, so until then a piece may be copied
whenever the worker waits for others. What a forward may change is copied at once.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from bamboo_trainer.stage.state.layer_state import LayerState

PIECE_BYTES: Final = 16 << 20  # a few milliseconds


class Copying(Protocol):
    """Copies that are being made. layers: complete when it is done."""

    @property
    def layers(self) -> Mapping[int, LayerState]: ...

    @property
    def done(self) -> bool: ...

    def copy_piece(self) -> None:
        """One more, before anything of the state changes."""
        ...


class LateCopies:
    """layers: states whose tensors of these kinds are the stage's own until they are copied."""

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
        """Where the copy will be."""
        if not source.is_contiguous() or source.layout is not torch.strided:
            return source.to("cpu", copy=True)
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        (here, there), length = (source.view(-1), copy.view(-1)), PIECE_BYTES // source.element_size()
        self._pieces.extend((here[i : i + length], there[i : i + length]) for i in range(0, here.numel(), length))
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
