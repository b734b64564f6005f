"""The entries of a checkpoint's plain state dict, read from the beginnings of its files: names, shapes, places.

Layers' files are also read here, so that every reader reports a damaged one in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from bamboo_core.checkpoint.errors import CheckpointDamaged
from bamboo_core.checkpoint.manifest import CheckpointManifest
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.layer_file import (
    LENGTH_BYTES,
    LayerHeader,
    TensorEntry,
    decode,
    header_size,
    read_header,
)
from bamboo_trainer.frames.payloads import CommonState
from bamboo_trainer.stage.state.layer_state import LayerState, layer_of

_FIRST_BYTES: Final = 64 << 10  # the whole header of most layers fits


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of the state dict. layer, tensor: its file, and its name there, which several entries may share.

    dtype, shape: as the file stores them, a complex one with a last dimension of two.
    """

    name: str
    layer: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    complex: bool
    bytes: int


def read_entries(store: CheckpointStore, manifest: CheckpointManifest) -> tuple[StateEntry, ...]:
    """Return the entries in the model's order: "layers.0.weight" and so on, like `StageValues.state_tensors`.

    Raises CheckpointDamaged, StoreUnavailable. Reads only the files' beginnings, without checking them: a later reader
    of a layer must compare.
    """
    headers = [_header(store, manifest, part.layer) for part in manifest.layers]
    try:
        return tuple(
            _entry(f"layers.{number}.{name}", tensor, number, headers)
            for number, (header, _) in enumerate(headers)
            for name, tensor in header.names.items()
        )
    except CheckpointDamaged:
        for part in manifest.layers:  # if two files disagree, the error names the changed one
            store.read_part(manifest, part.layer)
        raise


def read_layer(store: CheckpointStore, manifest: CheckpointManifest, layer: int) -> LayerState:
    """Read and check a layer's whole file. Raises CheckpointDamaged, which names the file, or StoreUnavailable."""
    data = store.read_part(manifest, layer)
    try:
        return replace(decode(data), common=msgspec.convert(manifest.common, CommonState))
    except (CheckpointDamaged, msgspec.ValidationError) as error:
        raise CheckpointDamaged(f"{_shown(store, manifest, layer)}: {error}") from None


def by_file(entries: Sequence[StateEntry]) -> Mapping[int, tuple[StateEntry, ...]]:
    """Group entries by file."""
    files: dict[int, list[StateEntry]] = {}
    for entry in entries:
        files.setdefault(entry.layer, []).append(entry)
    return {layer: tuple(found) for layer, found in sorted(files.items())}


def _header(
    store: CheckpointStore, manifest: CheckpointManifest, layer: int
) -> tuple[LayerHeader, dict[str, TensorEntry]]:
    start = store.read_start(manifest, layer, _FIRST_BYTES)
    try:
        if (size := header_size(start[:LENGTH_BYTES])) > len(start):
            start = store.read_start(manifest, layer, size)
        header, entries = read_header(start)
        if (header.layer, header.version) != (layer, manifest.step):
            raise CheckpointDamaged(f"it is layer {header.layer} of step {header.version}")
        if sum(entry.bytes for entry in entries.values()) != manifest.layers[layer].bytes - size:
            raise CheckpointDamaged("its tensors are not as large as its header says")
    except CheckpointDamaged as error:
        store.read_part(manifest, layer)  # raises if the file has changed, which then is the cause
        raise CheckpointDamaged(f"{_shown(store, manifest, layer)}: {error}") from None
    return header, entries


def _shown(store: CheckpointStore, manifest: CheckpointManifest, layer: int) -> str:
    return f"{store.shown}/{manifest.place.part(layer)}"


def _entry(
    name: str, tensor: str, number: int, headers: Sequence[tuple[LayerHeader, Mapping[str, TensorEntry]]]
) -> StateEntry:
    try:
        layer = layer_of(tensor)
        header, entries = headers[layer]
        found = entries[tensor]
    except (ValueError, LookupError):
        raise CheckpointDamaged(f"{name} is said to be {tensor!r}, which layer {number}'s checkpoint lacks") from None
    return StateEntry(
        name=name,
        layer=layer,
        tensor=tensor,
        dtype=found.dtype,
        shape=found.shape,
        complex=tensor in header.complex,
        bytes=found.bytes,
    )
