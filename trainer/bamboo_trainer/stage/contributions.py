"""Contributions of microbatches to a stage's running buffers: kept, sent and folded.

Contributions are many small tensors, so they are kept as one tensor of bytes and a list that describes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_trainer.frames.payloads import Contributed, Contribution
from bamboo_trainer.frames.tensors import DTYPE_NAMES, DTYPES
from bamboo_trainer.tasks.running_buffers import intercept, running_modules, shared_buffer
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import named_layer

Parts = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The contributions of one microbatch, in order, and the bytes of all their tensors, in host memory."""

    contributions: tuple[Contribution, ...]
    data: Tensor


_NONE: Final = Recorded((), torch.empty(0, dtype=torch.uint8))


def packed(recorded: Mapping[int, Recorded]) -> tuple[Contributed, Parts]:
    """Return a frame's payload and tensor for contributions by microbatch; no tensor if there is nothing to send."""
    payload = Contributed(microbatches={m: list(one.contributions) for m, one in sorted(recorded.items())})
    data = [one.data for _, one in sorted(recorded.items())]
    return payload, (torch.cat(data),) if any(one.numel() for one in data) else ()


def unpacked(payload: Contributed, tensors: Parts) -> dict[int, Recorded]:
    """Undo `packed`."""
    sizes = [sum(one.size for one in contributions) for contributions in payload.microbatches.values()]
    data = tensors[0] if tensors else torch.empty(0, dtype=torch.uint8)
    pieces = torch.split(data, sizes)
    return {
        m: Recorded(tuple(contributions), piece)
        for (m, contributions), piece in zip(payload.microbatches.items(), pieces, strict=True)
    }


class RunningBuffers:
    """The buffers of a stage's layers that forwards contribute to. Forwards do not change them from now on.

    size: of all of them, in bytes.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        """Find the buffers in the layers. Raises TaskError if a buffer belongs to several modules, whose contributions
        would have no order.
        """
        self._layers = layers
        self._found = [(index, one) for index, layer in layers.items() for one in running_modules(layer)]
        self._numbers = {id(one.module): number for number, (_, one) in enumerate(self._found)}
        owners: dict[int, str] = {}
        for index, name, buffer in self._all(contributing=True):
            place = f"{index}.{name}"
            if owners.setdefault(id(buffer), place) != place:
                raise shared_buffer(owners[id(buffer)], place)
        for _, one in self._found:
            intercept(one.module)
        self.size = sum(buffer.nbytes for _, _, buffer in self._all())

    def __bool__(self) -> bool:
        return bool(self._found)

    def places(self) -> frozenset[tuple[int, str]]:
        """Return the layer and name of each buffer."""
        return frozenset((index, one.place(name)) for index, one in self._found for name in one.names)

    def _all(self, *, contributing: bool = False) -> Iterator[tuple[int, str, Tensor]]:
        for index, one in self._found:
            if contributing and not one.contributes:
                continue
            for name, buffer in one.buffers.items():
                yield index, one.place(name), buffer

    def record(self, contributed: Sequence[tuple[nn.Module, Parts]]) -> Recorded:
        """Return the contributions of a microbatch's forward. Raises TaskError for a module that is not the layers'."""
        if not contributed:
            return _NONE
        contributions, data = [], []
        for module, tensors in contributed:
            number = self._numbers.get(id(module))
            if number is None:
                raise TaskError(
                    f"{type(module).__name__} contributes to buffers, and is none of the layer's modules "
                    "(Module.named_modules): let the layer have it as an attribute"
                )
            forms = [(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in tensors]
            contributions.append(Contribution(module=number, tensors=forms))
            data += [_bytes(tensor) for tensor in tensors]
        return Recorded(tuple(contributions), _joined(data))

    def check(self, contributed: Contributed) -> None:
        """Raise ValueError if a received contribution is to an unknown module, or of another form.

        Torch's own modules contribute a mean and a variance; only its update knows the form that a module with declared
        buffers contributes.
        """
        for contribution in (one for of_one in contributed.microbatches.values() for one in of_one):
            if contribution.module >= len(self._found):
                count = len(self._found)
                raise ValueError(f"a contribution to module {contribution.module} of {count} with running buffers")
            forms = self._found[contribution.module][1].forms
            if forms is not None and [(DTYPES[name], shape) for name, shape in contribution.tensors] != forms:
                raise ValueError(
                    f"a contribution {contribution.tensors[:4]} to {self._named(contribution.module)}, "
                    f"expected {[(DTYPE_NAMES[dtype], shape) for dtype, shape in forms]}"
                )

    def _named(self, number: int) -> str:
        index, one = self._found[number]
        within = f"{one.path!r} of " if one.path else ""
        return f"{within}{named_layer(self._layers[index], index)}"

    def folded(self, recorded: Mapping[int, Recorded], microbatches: int) -> Parts:
        """Return the bytes of all values after a step, in host memory: one tensor, or none without such buffers.

        recorded: of all microbatches of the step. Raises TaskError.
        """
        if not self._found:
            return ()
        assert sorted(recorded) == list(range(microbatches)), f"contributions of {sorted(recorded)} of {microbatches}"
        by_module: list[list[Parts]] = [[] for _ in self._found]
        for m in range(microbatches):
            for number, tensors in _tensors(recorded[m]):
                by_module[number].append(tensors)
        values = []
        for number, contributed in enumerate(by_module):
            _, one = self._found[number]
            folded = one.folded(self._named(number), contributed)
            values += [_bytes(folded[name]) for name in one.names]
        return (_joined(values),)

    def set(self, values: Tensor) -> None:
        """Set the buffers to the values that `folded` has computed on any holder of this stage."""
        start = 0
        with torch.no_grad():
            for _, _, buffer in self._all():
                end = start + buffer.nbytes
                buffer.copy_(_of_bytes(values[start:end], buffer.dtype, tuple(buffer.shape)))
                start = end


def _tensors(recorded: Recorded) -> Iterator[tuple[int, Parts]]:
    start = 0
    for contribution in recorded.contributions:
        tensors = []
        for (name, shape), size in zip(contribution.tensors, contribution.sizes(), strict=True):
            tensors.append(_of_bytes(recorded.data[start : start + size], DTYPES[name], shape))
            start += size
        yield contribution.module, tuple(tensors)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(data: Sequence[Tensor]) -> Tensor:
    return torch.cat([d.to(data[0].device) for d in data]).cpu() if data else torch.empty(0, dtype=torch.uint8)


def _of_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a copy as this dtype and shape, since the bytes may begin at any offset."""
    return data.clone().view(dtype).view(shape)
