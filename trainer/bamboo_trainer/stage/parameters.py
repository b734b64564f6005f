"""A stage's parameters as views of one flat buffer, so that its gradient travels and is reduced as one tensor.

Behind each parameter's gradient stands its mark: more than zero if a backward of the step has reached the parameter. An
optimizer skips the others, as plain PyTorch does with those whose `grad` is None. Because the mark is a number of the
gradient it is summed, sent, logged and repeated with it, and has no way of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # elements that a parameter's place, its mark included, is padded to


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter's place in the flat buffers."""

    name: str  # of a tied group: its first name, wherever that layer lives
    parameter: nn.Parameter
    offset: int
    group: int | None  # of tied parameters

    @property
    def mark(self) -> int:
        """The place of the parameter's mark in a gradient."""
        return self.offset + self.parameter.numel()

    @property
    def size(self) -> int:
        """Elements of the parameter and its mark."""
        return self.parameter.numel() + 1

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.mark].view(self.parameter.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSegment:
    """A tied group's place in this stage's flat gradient, its mark included; its gradient is the sum over `stages`."""

    group: int
    offset: int
    size: int
    stages: tuple[int, ...]


def tied_segments(
    slots: Iterable[Slot], groups: Mapping[str, tuple[int, str]], stages: Sequence[tuple[int, int]]
) -> tuple[TiedSegment, ...]:
    """Where a stage with these slots keeps the groups that other stages hold too."""
    holders: dict[int, set[int]] = {}
    for name, (group, _) in groups.items():
        layer = int(name.partition(".")[0])
        stage = next(s for s, (first, end) in enumerate(stages) if first <= layer < end)
        holders.setdefault(group, set()).add(stage)
    return tuple(
        TiedSegment(
            group=slot.group,
            offset=slot.offset,
            size=slot.size,
            stages=tuple(sorted(holders[slot.group])),
        )
        for slot in slots
        if slot.group is not None and len(holders[slot.group]) > 1
    )


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
        self._marks = torch.tensor([slot.mark for slot in self.slots], dtype=torch.int64, device=device)
        self._reached: set[int] = set()  # numbers of the slots whose gradient a backward has added to
        for number, slot in enumerate(self.slots):
            slot.parameter.register_post_accumulate_grad_hook(_note(self._reached, number))  # type: ignore[no-untyped-call]
        held = [self.flat, *self.constants.values()]
        strided = [t for t in held if t.layout is torch.strided]  # `snapshot.check` refuses the others
        self._storages = {t.untyped_storage().data_ptr() for t in strided if t.numel()}

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
                slot = Slot(canonical, parameter, self.size, group)
                self.slots.append(slot)
                self.size += -(-slot.size // ALIGNMENT) * ALIGNMENT
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

    def bind_used(self, gradient: Tensor, used: Sequence[bool]) -> None:
        """The same for an optimizer: a parameter that the step has not used has no gradient."""
        self.bind(gradient)
        for slot, is_used in zip(self.slots, used, strict=True):
            if not is_used:
                slot.parameter.grad = None

    def mark(self, gradient: Tensor, marked: set[int]) -> None:
        """Mark in the gradient what backwards have reached since the last call. marked: slots that it has marked."""
        new = sorted(self._reached - marked)
        self._reached.clear()
        if new:
            gradient.index_fill_(0, self._marks[new], 1.0)
            marked.update(new)

    def used(self, gradient: Tensor) -> list[bool]:
        """Which slots any backward has reached whose sum this gradient is."""
        return [bool(mark) for mark in (gradient[self._marks] > 0).tolist()]

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


def _note(reached: set[int], number: int) -> Callable[[Tensor], None]:
    """A hook for a parameter. It holds nothing of the stage, which would then not be freed at once."""

    def accumulated(_: Tensor) -> None:
        reached.add(number)

    return accumulated
