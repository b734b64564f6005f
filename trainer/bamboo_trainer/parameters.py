"""A stage's parameters as views of one flat buffer, so that its gradient travels and is reduced as one tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # elements that each parameter's place is padded to


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter's place in the flat buffers."""

    name: str  # of a tied group: its first name, wherever that layer lives
    parameter: nn.Parameter
    offset: int
    group: int | None  # of tied parameters

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.parameter.numel()].view(self.parameter.shape)


class FlatParameters:
    """What the layers hold: trained parameters in `flat` (fp32, [size]), and `constants` (buffers, frozen parameters).

    layers: by number; moved to the device. shared: the tied parameters' group and name, by id, as `ties.tie` gives it.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], shared: Mapping[int, tuple[int, str]], device: torch.device
    ) -> None:
        self.slots: list[Slot] = []
        self.constants: dict[str, Tensor] = {}
        self.size = 0
        self._collect(layers, shared, device)
        self.flat = torch.zeros(self.size, dtype=torch.float32, device=device)
        for slot in self.slots:
            view = slot.of(self.flat)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        self._bound: Tensor | None = None
        held = [self.flat, *self.constants.values()]
        self._storages = {t.untyped_storage().data_ptr() for t in held if t.numel()}

    def _collect(
        self, layers: Mapping[int, nn.Module], shared: Mapping[int, tuple[int, str]], device: torch.device
    ) -> None:
        seen: set[int] = set()
        for index, layer in layers.items():
            layer.to(device)
            for name, parameter in layer.named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                group, canonical = shared.get(id(parameter), (None, f"{index}.{name}"))
                if not parameter.requires_grad:
                    self.constants[canonical] = parameter
                    continue
                self.slots.append(Slot(canonical, parameter, self.size, group))
                self.size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            for name, buffer in layer.named_buffers():
                self.constants[f"{index}.{name}"] = buffer

    def holds(self, tensor: Tensor) -> bool:
        """Is it a parameter or a constant, or a part of one?"""
        return tensor.untyped_storage().data_ptr() in self._storages

    def bind(self, gradient: Tensor) -> None:
        """Makes the parameters' gradients views of this tensor, which backwards then add to."""
        if self._bound is gradient:
            return
        if gradient.shape != (self.size,) or gradient.dtype != torch.float32:
            raise ValueError(
                f"the stage's gradient must be float32 [{self.size}], got {gradient.dtype} {list(gradient.shape)}"
            )
        for slot in self.slots:
            slot.parameter.grad = slot.of(gradient)
        self._bound = gradient

    def unbind(self) -> None:
        for slot in self.slots:
            slot.parameter.grad = None
        self._bound = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All that the layers hold, in fixed order; the tensors themselves."""
        for slot in self.slots:
            yield f"parameter:{slot.name}", slot.parameter
        for name, constant in self.constants.items():
            yield f"constant:{name}", constant
