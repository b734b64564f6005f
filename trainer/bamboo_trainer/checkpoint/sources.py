"""Sources of an export: a checkpoint, or weights in files. Both have a state dict's tensors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bamboo_core.checkpoint.errors import CheckpointDamaged, CheckpointError
from bamboo_core.checkpoint.find import find
from bamboo_core.checkpoint.manifest import CheckpointManifest
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.complaints import said_by
from bamboo_core.storage.url import parse_url
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.layer_file import as_stored
from bamboo_trainer.checkpoint.state_dict import StateEntry, read_entries, read_layer
from bamboo_trainer.frames.tensors import DTYPES
from bamboo_trainer.models.parts.huggingface_weights import INDEX, SINGLE, published_files
from bamboo_trainer.tasks.user_code import same_bits

OF_MODULE: Final = re.compile(r"layers\.\d+\.module\.(.+)")  # the names that `from_module` gives its layers' tensors


class StateSource(Protocol):
    """A source of a state dict. entries: of the whole state dict; their `layer` numbers a file. step: None if
    unknown.
    """

    @property
    def step(self) -> int | None: ...

    def entries(self) -> tuple[StateEntry, ...]: ...

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        """Return the tensors of these entries, all in one file, by name, as they are stored. Raises StorageError."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as the source of a state dict."""

    store: CheckpointStore
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def entries(self) -> tuple[StateEntry, ...]:
        return read_entries(self.store, self.manifest)

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        """Return a layer's tensors, after comparing them with the file's header."""
        state = read_layer(self.store, self.manifest, file)
        stored = {name: as_stored(tensor) for name, tensor in state.tensors.items()}
        for entry in entries:
            found = stored.get(entry.tensor)
            if found is None or (tuple(found.shape), found.dtype) != (entry.shape, DTYPES[entry.dtype]):
                shown = f"{self.store.shown}/{self.manifest.place.part(file)}"
                raise CheckpointDamaged(f"{shown} has changed while it was read")
        return stored


class TensorFiles:
    """Files of safetensors that together are one state dict."""

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
        with _opened(self._files[file]) as opened:
            return {entry.tensor: opened.get_tensor(entry.tensor) for entry in entries}


def _entry(path: Path, number: int, name: str, part: Any) -> StateEntry:
    dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} in {path} is of type {dtype}, which cannot be used here")
    size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
    return StateEntry(name=name, layer=number, tensor=name, dtype=dtype, shape=shape, complex=False, bytes=size)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {said_by(error)}") from None


def tensor_files(path: Path) -> TensorFiles | None:
    """Return the tensors of a path on this machine: a file of safetensors, or a folder with one or with an index of
    several; None for anything else, such as a folder of checkpoints. Raises ValueError for a damaged index.
    """
    if path.is_file():
        return TensorFiles([path])
    if has_tensors(path):
        return TensorFiles(list(dict.fromkeys(published_files(path).values())))
    return None


def has_tensors(folder: Path) -> bool:
    """Return whether it is a folder of a run's weights, or of a published model."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def under_module_names(source: StateSource, entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return the entries of a module split by `from_module` under the names of that module's own `state_dict`.

    A tied tensor, which is in several layers, appears once. Entries of other layers stay as they are. Only tensors that
    several layers have are read. Raises StorageError.
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
    """Return whether these entries are the same tensor."""
    places = {(entry.layer, entry.tensor): entry for entry in entries}
    first, *others = places.values()
    if not others:
        return True
    value = source.tensors(first.layer, [first])[first.tensor]
    return all(same_bits(value, source.tensors(one.layer, [one])[one.tensor]) for one in others)


def open_source(url: str, step: int | None) -> tuple[StateSource, list[str]]:
    """Return the weights at a URL, folder or file, or the checkpoint of that step there, None for the newest; and why
    newer ones were passed over. Raises StorageError, ExportError.
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
