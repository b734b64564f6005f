"""Digests and checksums of a stage's whole state, and whether it can be sent and saved."""

import ctypes
import hashlib
from collections.abc import Collection, Iterator

from torch import Tensor

from bamboo_core.control.digests import add_digests
from bamboo_trainer.frames.tensors import unsendable
from bamboo_trainer.stage.checksums import checksum, checksum_of
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.tasks.task_errors import TaskError

NUMBERS = "numbers"  # the name of the optimizer's plain numbers among checksums


def check(parameters: FlatParameters, optimizer: OptimizerState) -> None:
    """Raise TaskError if a part of the state could never be sent to a replica, or saved in a checkpoint."""
    for name, tensor in _named(parameters, optimizer):
        if wrong := unsendable(tensor):
            raise TaskError(f"{name} is a tensor of {wrong}")
    optimizer.scalars()


def digest(parameters: FlatParameters, optimizer: OptimizerState, without: Collection[str] = ()) -> str:
    """Return the sum of the sha256 of all parts; equal digests mean bit-equal state. without: slots left out."""
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
    """Return 64-bit checksums of all tensors, by name, computed on their device, and of all numbers."""
    sums = {name: checksum(tensor) for name, tensor in _named(parameters, optimizer)}
    scalars = sorted((name, repr(value)) for name, value in optimizer.scalars().items())
    return {**sums, NUMBERS: checksum_of((), scalars)}


def _slot(name: str) -> str:
    """Return the name of the parameter or constant that a part belongs to. name: the part's."""
    kind, _, place = name.partition(":")
    return place.rpartition(":")[0] if kind == "state" else place


def _named(parameters: FlatParameters, optimizer: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole state in fixed order; the tensors themselves."""
    yield from parameters.named()
    yield from optimizer.named()
