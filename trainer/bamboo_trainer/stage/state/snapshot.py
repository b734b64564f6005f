"""A stage's whole state as named tensors and numbers: copies, restoring, digests and checksums.

meta: {"format", "version", "names": of the parts, "scalars": the optimizer's plain numbers by name}.
"""

import ctypes
import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bamboo_core.control.digests import add_digests
from bamboo_trainer.frames.tensors import unsendable
from bamboo_trainer.stage.checksums import checksum, checksum_of
from bamboo_trainer.stage.state import early_stop
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.task_errors import TaskError

SNAPSHOT_FORMAT = 1
NUMBERS = "numbers"  # the name of the optimizer's plain numbers among checksums


def check(parameters: FlatParameters, optimizer: OptimizerState) -> None:
    """Raise TaskError if a part of the state could never be sent to a replica, or saved in a checkpoint."""
    for name, tensor in _named(parameters, optimizer):
        if wrong := unsendable(tensor):
            raise TaskError(f"{name} is a tensor of {wrong}")
    optimizer.scalars()


def take(parameters: FlatParameters, optimizer: OptimizerState, version: int) -> tuple[Parts, dict[str, Any]]:
    named = list(_named(parameters, optimizer))
    meta = {
        "format": SNAPSHOT_FORMAT,
        "version": version,
        "names": [name for name, _ in named],
        "scalars": optimizer.scalars(),
    }
    return tuple(t.detach().to("cpu", copy=True) for _, t in named), meta


def restore(parameters: FlatParameters, optimizer: OptimizerState, parts: Parts, meta: Mapping[str, Any]) -> int:
    """Restore a snapshot, return its version. Raises ValueError, with nothing changed, if it does not fit."""
    names, scalars, version = _checked_meta(parts, meta)
    given = dict(zip(names, parts, strict=True))
    own = dict(_named(parameters, optimizer))
    _check_names(given, scalars, own, optimizer)
    _check_tensors(given, own)
    optimizer.check_scalars(scalars)
    with torch.no_grad():
        if not optimizer.fixed:
            optimizer.replace_tensors(given)
        for name, tensor in _named(parameters, optimizer):
            if name.startswith("constant:") and _same_bits(tensor, given[name]):
                continue  # another stage may share this tensor, and would take a write to it for the task's
            tensor.copy_(given[name])
    optimizer.set_scalars(scalars, version)
    return version


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    one, two = (t.detach().cpu().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(one, two)


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
        if _slot(name) not in without and not early_stop.is_of(name):
            digests.append(hashlib.sha256(f"{name} {scalar!r}".encode()).hexdigest())
    return add_digests(digests)


def checksums(parameters: FlatParameters, optimizer: OptimizerState) -> dict[str, int]:
    """Return 64-bit checksums of all tensors, by name, computed on their device, and of all numbers."""
    sums = {name: checksum(tensor) for name, tensor in _named(parameters, optimizer)}
    scalars = sorted((name, repr(value)) for name, value in optimizer.scalars().items() if not early_stop.is_of(name))
    return {**sums, NUMBERS: checksum_of((), scalars)}


def _slot(name: str) -> str:
    """Return the name of the parameter or constant that a part belongs to. name: the part's."""
    kind, _, place = name.partition(":")
    return place.rpartition(":")[0] if kind == "state" else place


def _named(parameters: FlatParameters, optimizer: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole state in fixed order; the tensors themselves."""
    yield from parameters.named()
    yield from optimizer.named()


def _checked_meta(parts: Parts, meta: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], int]:
    if meta.get("format") != SNAPSHOT_FORMAT:
        raise ValueError(f"unknown snapshot format {meta.get('format')!r}, expected {SNAPSHOT_FORMAT}")
    names, scalars, version = meta.get("names"), meta.get("scalars"), meta.get("version")
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError("the snapshot's names must be a list of texts")
    if len(set(names)) != len(names) or len(names) != len(parts):
        raise ValueError(f"the snapshot names {len(set(names))} distinct parts and holds {len(parts)}")
    if not isinstance(scalars, dict) or not all(isinstance(n, str) for n in scalars):
        raise ValueError("the snapshot's scalars must be a mapping of texts")
    if not all(value is None or isinstance(value, int | float) for value in scalars.values()):
        raise ValueError("the snapshot's scalars must be numbers")
    if both := sorted(scalars.keys() & set(names)):
        raise ValueError(f"the snapshot holds {both[0]} twice")
    if type(version) is not int or version < 0:
        raise ValueError(f"the snapshot's version must be a number of steps, got {version!r}")
    return list(names), scalars, version


def _check_names(
    given: Mapping[str, Tensor], scalars: Mapping[str, Any], own: Mapping[str, Tensor], optimizer: OptimizerState
) -> None:
    """Raise ValueError unless the names are exactly this stage's, except for optional ones of the optimizer."""
    names = {n for n in given.keys() | scalars.keys() if not optimizer.may_have(n)}
    expected = {n for n in own.keys() | optimizer.scalars().keys() if not optimizer.may_have(n)}
    if missing := sorted(expected - names):
        raise ValueError(f"the snapshot lacks {missing[0]} of this stage")
    if foreign := sorted(names - expected):
        raise ValueError(f"the snapshot holds {foreign[0]}, which this stage does not have")


def _check_tensors(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in own.keys() & given.keys():
        part, tensor = given[name], own[name]
        if part.shape != tensor.shape or part.dtype != tensor.dtype:
            raise ValueError(
                f"the snapshot's {name} is {part.dtype} {list(part.shape)}, "
                f"expected {tensor.dtype} {list(tensor.shape)}"
            )
