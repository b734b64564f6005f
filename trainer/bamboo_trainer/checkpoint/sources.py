"""Sources of a state dict, for exports, initial weights and `load`: a checkpoint, or weights in safetensors files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_core.checkpoint.manifest import CheckpointDamaged, CheckpointError, CheckpointManifest
from bamboo_core.checkpoint.selection import find
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.complaints import complain
from bamboo_core.storage.url import parse_url
from bamboo_trainer.checkpoint.layer_file import ExportError, StateEntry, as_stored, by_file, read_entries, read_layer
from bamboo_trainer.frames import DTYPES
from bamboo_trainer.models.huggingface_files import INDEX, SINGLE, opened, published_files
from bamboo_trainer.tasks.user_code import same_bits

OF_MODULE: Final = re.compile(r"layers\.\d+\.module\.(.+)")  # the names that `from_module` gives its layers' tensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as the source of a state dict. Each layer has a file of its own."""

    store: CheckpointStore
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def entries(self) -> tuple[StateEntry, ...]:
        """List the tensors of the whole state dict; an entry's `layer` is its file's number. Raises StorageError."""
        return read_entries(self.store, self.manifest)

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        """Return tensors of a file, as stored, by `StateEntry.tensor`: at least the tensors of `entries`, which must be
        in this file. Raises StorageError, also if a tensor is missing or differs from its entry in shape or dtype.
        """
        state = read_layer(self.store, self.manifest, file)
        stored = {name: as_stored(tensor) for name, tensor in state.tensors.items()}
        for entry in entries:
            found = stored.get(entry.tensor)
            if found is None or (tuple(found.shape), found.dtype) != (entry.shape, DTYPES[entry.dtype]):
                shown = f"{self.store.shown}/{self.manifest.place.part(file)}"
                raise CheckpointDamaged(f"{shown} has changed while it was read")
        return stored


class TensorFiles:
    """Safetensors files that together hold one state dict, of an unknown step. Same methods as `Checkpoint`."""

    step = None

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)

    def entries(self) -> tuple[StateEntry, ...]:
        found: dict[str, StateEntry] = {}
        for number, path in enumerate(self._files):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if name in found:
                        raise CheckpointError(f"{path} has {name}, which {self._files[found[name].layer]} has too")
                    found[name] = _entry(path, number, name, file.get_slice(name))
        return tuple(found.values())

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        with _opened(self._files[file]) as content:
            return {entry.tensor: content.get_tensor(entry.tensor) for entry in entries}


StateSource = Checkpoint | TensorFiles


def _entry(path: Path, number: int, name: str, part: Any) -> StateEntry:
    dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} in {path} is of type {dtype}, which cannot be used here")
    size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
    return StateEntry(name=name, layer=number, tensor=name, dtype=dtype, shape=shape, complex=False, bytes=size)


def _opened(path: Path) -> Any:
    try:
        return opened(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def tensor_files(path: Path) -> TensorFiles | None:
    """Return the safetensors files at a local path: the file itself, or a folder's `SINGLE`, else the files that
    its `INDEX` names. None for other paths. Raises ValueError if a folder's `SINGLE` or `INDEX` is invalid.
    """
    if path.is_file():
        return TensorFiles([path])
    if has_tensors(path):
        return TensorFiles(list(dict.fromkeys(published_files(path).values())))
    return None


def has_tensors(folder: Path) -> bool:
    """Return whether a folder has the weights of a run or of a published model (`SINGLE` or `INDEX`)."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def under_module_names(source: StateSource, entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return entries under the names of a module's own `state_dict` if each has a name of the form that `from_module`
    gives (`OF_MODULE`); else return them unchanged.

    A tensor that several layers have under one name appears once. Tensors are read only if a name is stored more than
    once, to compare their bits; if these differ, all entries are returned unchanged. Raises StorageError.
    """
    groups: dict[str, list[StateEntry]] = {}
    for entry in entries:
        match = OF_MODULE.fullmatch(entry.name)
        if match is None:
            return tuple(entries)
        groups.setdefault(match[1], []).append(entry)
    if not all(_is_one(source, group) for group in groups.values()):
        return tuple(entries)  # each layer has a module of its own
    return tuple(replace(group[0], name=name) for name, group in groups.items())


def _is_one(source: StateSource, entries: Sequence[StateEntry]) -> bool:
    """Return whether entries of one name are the same tensor: stored once, or with equal bits in several layers."""
    places = {(entry.layer, entry.tensor): entry for entry in entries}
    first, *others = places.values()
    if not others:
        return True
    value = source.tensors(first.layer, [first])[first.tensor]
    return all(same_bits(value, source.tensors(one.layer, [one])[one.tensor]) for one in others)


def open_source(url: str, step: int | None) -> tuple[StateSource, list[str]]:
    """Return the weights or the checkpoint at a URL, and a sentence for each newer one that `find` rejected.

    url: a file or a folder of weights, or the place of checkpoints. step: the checkpoint's step; None: the weights, or
    the newest complete checkpoint. Raises StorageError.
    """
    try:
        files = tensor_files(Path(url)) if step is None else None
    except ValueError as error:
        raise ExportError(str(error)) from None
    if files is not None:
        return files, []
    store = CheckpointStore(url)
    place = parse_url(url)
    found, weights = store.list(), Path(url, "weights")
    if not found and has_tensors(weights):
        raise ExportError(f"{url} has no checkpoints, expected those or a folder of weights, such as {weights}")
    if place.protocol == "file" and not Path(place.path).exists():
        raise ExportError(f"there is no {place.path}")
    manifest, passed = find(found, store.shown, step)
    return Checkpoint(store, manifest), list(passed)


def load(url: str | Path, *, step: int | None = None) -> dict[str, Tensor]:
    """Load the parameters and buffers of a file or folder of weights, or of a checkpoint, on the CPU.

    Tensors of one module split by `from_module` have the names of the module's own `state_dict`; all others have their
    names in the files of weights, or "layers.NUMBER.NAME" in a checkpoint.

    url: the folder `weights` written by `bamboo run --output`, a file or folder of safetensors such as an export, or
    the place of checkpoints. step: the step of a checkpoint; None: the weights, or the newest complete checkpoint.
    Raises StorageError if nothing is stored at the URL, if the data is damaged, or if the store fails.
    """
    source, passed = open_source(str(url), step)
    entries = under_module_names(source, source.entries())
    for note in passed:
        complain(note)
    found = read_tensors(source, entries)
    return {entry.name: found[entry.name] for entry in entries}


def read_tensors(source: StateSource, entries: Sequence[StateEntry]) -> dict[str, Tensor]:
    """Return the tensors by `StateEntry.name`, complex ones as complex; each file is read once. Raises StorageError."""
    found: dict[str, Tensor] = {}
    for file, wanted in by_file(entries).items():
        tensors = source.tensors(file, wanted)
        for entry in wanted:
            stored = tensors[entry.tensor]
            found[entry.name] = torch.view_as_complex(stored) if entry.complex else stored
    return found
