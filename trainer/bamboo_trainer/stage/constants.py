"""Detects forwards that change buffers or frozen parameters, or add parameters.

Such a forward, repeated on another worker, would see other values, or parameters that are not trained.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from bamboo_trainer.stage.checksums import checksum
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import changed_buffer, new_parameter

_Place = tuple[int, str]  # layer and name


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor as last seen. changes: torch's count of writes to it. sum: checksum of its bits; None for a frozen
    parameter, which is large, and for a running buffer, which changes every step.
    """

    tensor: Tensor
    changes: int
    sum: int | None


class _Kind(StrEnum):
    """The kind of a tensor, as error messages name it."""

    BUFFER = "buffer"
    RUNNING = "running buffer"
    FROZEN = "frozen parameter"
    TRAINED = "trained parameter"


class Constants:
    """The constants of a stage's layers, as they were when the stage was built or restored. running: places of the
    buffers that commits, and nothing else, may change.
    """

    def __init__(self, layers: Mapping[int, nn.Module], running: Collection[_Place] = ()) -> None:
        self._layers, self._running = layers, frozenset(running)
        self._known: dict[_Place, _Known] = {}
        self._trained: dict[_Place, Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Accept the current values as right."""
        tensors = list(self._all())
        self._trained = {place: tensor for place, tensor, kind in tensors if kind is _Kind.TRAINED}
        self._known = {
            place: _Known(tensor, _changes(tensor), checksum(tensor) if kind is _Kind.BUFFER else None)
            for place, tensor, kind in tensors
            if kind is not _Kind.TRAINED
        }

    def renew_running(self) -> None:
        """Accept the running buffers' values after a commit."""
        for place in self._running:
            tensor = self._layers[place[0]].get_buffer(place[1])
            self._known[place] = _Known(tensor, _changes(tensor), None)

    def check(self, bits: bool = False) -> None:
        """Raise TaskError if a constant was written to or replaced, and its bits differ, or a trained parameter is new.

        Cheap: compares bits only where torch counted a write. bits: compare the bits of all buffers, since torch does
        not count writes through numpy or `.data`.
        """
        seen = set()
        for place, tensor, kind in self._all():
            if kind is _Kind.TRAINED:
                if self._trained.get(place) is not tensor:
                    raise new_parameter(self._layers[place[0]], *place)
                continue
            seen.add(place)
            self._check(place, tensor, kind, bits)
        for place in self._known.keys() - seen:
            raise self._changed(place, _Kind.BUFFER)

    def _check(self, place: _Place, tensor: Tensor, kind: _Kind, bits: bool) -> None:
        known = self._known.get(place)
        if known is None:
            raise self._changed(place, kind)
        written = known.tensor is not tensor or known.changes != _changes(tensor)
        if not written and (not bits or known.sum is None):
            return
        if known.sum is None or known.sum != checksum(tensor):
            raise self._changed(place, kind)
        self._known[place] = _Known(tensor, _changes(tensor), known.sum)

    def _changed(self, place: _Place, kind: _Kind) -> TaskError:
        layer, name = place
        return changed_buffer(self._layers[layer], layer, name, kind)

    def _all(self) -> Iterator[tuple[_Place, Tensor, _Kind]]:
        for index, layer in self._layers.items():
            for name, buffer in layer.named_buffers():
                place = (index, name)
                yield place, buffer, _Kind.RUNNING if place in self._running else _Kind.BUFFER
            for name, parameter in layer.named_parameters():
                yield (index, name), parameter, _Kind.TRAINED if parameter.requires_grad else _Kind.FROZEN


def _changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
