"""Checksums of tensors and of a stage's whole state, and detection of forwards that change constants.

`Constants` detects a forward that changes buffers or frozen parameters, or adds parameters. If another worker repeats
such a forward, it reads other values, or uses parameters that are not trained.
"""

import ctypes
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from bamboo_core.control.digests import add_digests
from bamboo_trainer.frames import unsendable
from bamboo_trainer.stage.optimizer_state import OptimizerState
from bamboo_trainer.stage.parameters import FlatParameters
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import changed_buffer, new_parameter

CHUNK: Final = 1 << 14  # words of 64 bits
_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no chunk is lost in the product
_SIGN: Final = (1 << 64) - 1


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the bits, the same on any device. Other bits collide once in about 2**64 cases."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.is_cpu and whole <= 8 * CHUNK:  # numpy takes a third of torch's time for a small tensor
        array = data.numpy()
        total = int(np.dot(array[:whole].view(np.int64), _weights(data.device).numpy()[: whole // 8]))
        rest = array[whole:].tobytes()
    else:
        total, rest = int(_total(data[:whole])), bytes(data[whole:].tolist())
    return (total * 31 + int.from_bytes(rest, "little")) & _SIGN


def _total(data: Tensor) -> Tensor:
    words, weights = (data.clone() if data.storage_offset() % 8 else data).view(torch.int64), _weights(data.device)
    total = (words[:CHUNK] * weights[: words.numel()]).sum()
    for chunk in torch.split(words[CHUNK:], CHUNK) if words.numel() > CHUNK else ():
        total.mul_(_STEP).add_((chunk * weights[: chunk.numel()]).sum())
    return total


def checksum_of(tensors: Iterable[Tensor | None], values: Iterable[object] = ()) -> int:
    """Return a 64-bit checksum of several tensors in order, with their dtypes and shapes, and of plain values."""
    described = [t if t is None else (str(t.dtype), tuple(t.shape), checksum(t)) for t in tensors]
    return int.from_bytes(hashlib.blake2b(repr((described, list(values))).encode(), digest_size=8).digest(), "big")


@cache
def _weights(device: torch.device) -> Tensor:
    """Return CHUNK pseudorandom odd weights, equal on all machines. They make a checksum depend on positions."""
    words = torch.arange(1, CHUNK + 1, dtype=torch.int64)
    for shift in (29, 31, 32):
        words = (words ^ (words >> shift)) * _STEP
    return (words | 1).to(device)


NUMBERS = "numbers"  # the name of the optimizer's plain numbers among checksums


def check(parameters: FlatParameters, optimizer: OptimizerState) -> None:
    """Raise TaskError if a part of the state cannot be sent to a replica or saved in a checkpoint."""
    for name, tensor in _named(parameters, optimizer):
        if wrong := unsendable(tensor):
            raise TaskError(f"{name} is a tensor of {wrong}")
    optimizer.scalars()


def digest(parameters: FlatParameters, optimizer: OptimizerState, without: Collection[str] = ()) -> str:
    """Return the sum of the SHA-256 of the state's tensors and numbers. without: names to omit, as "0.weight"."""
    digests = []
    for name, tensor in _named(parameters, optimizer):
        if _slot(name) not in without:
            sha = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            data = tensor.detach().cpu().contiguous()
            sha.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"")
            digests.append(sha.hexdigest())
    for name, scalar in optimizer.scalars().items():
        if _slot(name) not in without:
            digests.append(hashlib.sha256(f"{name} {scalar!r}".encode()).hexdigest())
    return add_digests(digests)


def checksums(parameters: FlatParameters, optimizer: OptimizerState) -> dict[str, int]:
    """Return a 64-bit checksum of each tensor, by name, computed on its device, and one of all numbers (NUMBERS)."""
    sums = {name: checksum(tensor) for name, tensor in _named(parameters, optimizer)}
    scalars = sorted((name, repr(value)) for name, value in optimizer.scalars().items())
    return {**sums, NUMBERS: checksum_of((), scalars)}


def _slot(name: str) -> str:
    """Return the name of the parameter or constant to which a tensor or number of the state belongs."""
    kind, _, place = name.partition(":")
    return place.rpartition(":")[0] if kind == "state" else place


def _named(parameters: FlatParameters, optimizer: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the state, not copied, by name and in fixed order."""
    yield from parameters.named()
    yield from optimizer.named()


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
    """The buffers and frozen parameters of a stage's layers, as built or restored, to detect changes. running: the
    buffers that only commits may change, by layer and name.
    """

    def __init__(self, layers: Mapping[int, nn.Module], running: Collection[_Place] = ()) -> None:
        self._layers, self._running = layers, frozenset(running)
        self._known: dict[_Place, _Known] = {}
        self._trained: dict[_Place, Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Record the present values of the constants; later checks compare with them."""
        tensors = list(self._all())
        self._trained = {place: tensor for place, tensor, kind in tensors if kind is _Kind.TRAINED}
        self._known = {
            place: _Known(tensor, _changes(tensor), checksum(tensor) if kind is _Kind.BUFFER else None)
            for place, tensor, kind in tensors
            if kind is not _Kind.TRAINED
        }

    def renew_running(self) -> None:
        """Accept the present values of the running buffers, which a commit has changed."""
        for place in self._running:
            tensor = self._layers[place[0]].get_buffer(place[1])
            self._known[place] = _Known(tensor, _changes(tensor), None)

    def check(self, bits: bool = False) -> None:
        """Raise TaskError if a buffer or frozen parameter is new, gone or changed, or a trained one new or replaced.

        A running buffer or frozen parameter counts as changed after any write or replacement. The bits of another
        buffer are compared if it was replaced or torch counted a write; with `bits` always, as torch counts no writes
        through numpy or `.data`.
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
