"""What no step may change: values of buffers and frozen parameters, and which parameters there are.

A forward that is repeated elsewhere would see other values, or parameters that nobody trains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bamboo_trainer.checksums import checksum
from bamboo_trainer.task_errors import TaskError
from bamboo_trainer.user_code import changed_buffer, new_parameter


@dataclass(frozen=True, slots=True)
class _Known:
    """changes: how often torch has seen it written to. sum: of its bits; None for a frozen parameter: it is large."""

    tensor: Tensor
    changes: int
    sum: int | None


class Constants:
    """Of the layers of a stage, as they were when the stage was built or restored."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._known: dict[tuple[int, str], _Known] = {}
        self._trained: dict[tuple[int, str], nn.Parameter] = {}
        self.renew()

    def renew(self) -> None:
        """They are right as they are now."""
        self._known = {
            place: _Known(tensor, _changes(tensor), checksum(tensor) if is_buffer else None)
            for place, tensor, is_buffer in self._all()
        }
        self._trained = dict(self._all_trained())

    def check(self, bits: bool = False) -> None:
        """Raises TaskError if one was written to or exchanged since, unless it has the same bits again.

        So it does for a trained parameter that was not there. Costs next to nothing: bits are looked at only if torch
        has seen a write. bits: look at those of all buffers, since a write through numpy or `.data` is not seen.
        """
        for (index, name), parameter in self._all_trained():
            if self._trained.get((index, name)) is not parameter:
                raise new_parameter(self._layers[index], index, name)
        there = set()
        for place, tensor, is_buffer in self._all():
            there.add(place)
            known = self._known.get(place)
            if known is None:
                raise self._changed(place, is_buffer)
            written = known.tensor is not tensor or known.changes != _changes(tensor)
            if written and known.sum is None:
                raise self._changed(place, is_buffer)
            if (written or bits) and known.sum is not None and known.sum != checksum(tensor):
                raise self._changed(place, is_buffer)
            self._known[place] = _Known(tensor, _changes(tensor), known.sum)
        for place in self._known.keys() - there:
            raise self._changed(place, True)

    def _changed(self, place: tuple[int, str], is_buffer: bool) -> TaskError:
        layer, name = place
        return changed_buffer(self._layers[layer], layer, name, "buffer" if is_buffer else "frozen parameter")

    def _all(self) -> Iterator[tuple[tuple[int, str], Tensor, bool]]:
        for index, layer in self._layers.items():
            for name, buffer in layer.named_buffers():
                yield (index, name), buffer, True
            for name, parameter in layer.named_parameters():
                if not parameter.requires_grad:
                    yield (index, name), parameter, False

    def _all_trained(self) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        for index, layer in self._layers.items():
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    yield (index, name), parameter


def _changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
