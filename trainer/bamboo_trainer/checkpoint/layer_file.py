"""Files of layers in a checkpoint: one layer's state as a safetensors file, and the plain state dict of all layers.

`encode` and `decode` convert a layer's state. The file's metadata has one entry, "bamboo": a `LayerHeader` as JSON.
Complex tensors are stored as real ones with a last dimension of two, and the `LayerHeader` lists their names.

`read_entries` lists the entries of the plain state dict (names, shapes, places) from the beginnings of the files.
Restores and exports both read layers with `read_layer`, so they report damaged files in the same way.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointDamaged, CheckpointManifest
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.files import Buffer
from bamboo_trainer.frames import DTYPE_NAMES, DTYPES, CommonState, byte_view
from bamboo_trainer.stage.layer_state import LayerState, layer_of
from bamboo_trainer.stage.optimizer_state import Scalar


class RestoreError(Exception):
    """Raised if a stage cannot be restored from a checkpoint. damaged: no later attempt can succeed either."""

    def __init__(self, checkpoint: CheckpointId, message: str, damaged: bool) -> None:
        super().__init__(message)
        self.checkpoint, self.damaged = checkpoint, damaged


class ExportError(StorageError):
    """Raised if an export is not possible, or a URL has no weights to read. The message is one sentence."""


FORMAT: Final = 1
MOST_HEADER: Final = 100 << 20  # bytes; safetensors' own limit
LENGTH_BYTES: Final = 8  # of the header's length, at the file's beginning
_ENTRY: Final = "bamboo"
_ALIGNMENT: Final = 8


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a safetensors header. data_offsets: begin and end (exclusive) of its bytes, from the header's end."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        dtype = DTYPES.get(self.dtype)
        if dtype is None or math.prod(self.shape) * dtype.itemsize != self.bytes:
            raise ValueError(f"a tensor of {self.dtype}, shape {self.shape} in {self.bytes} bytes")

    @property
    def bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class LayerHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bamboo's entry in the metadata of a layer's file. format: the version of this format. layer, version, names,
    scalars: see `LayerState`. complex: names of the tensors that were complex.
    """

    format: int
    layer: Annotated[int, msgspec.Meta(ge=0)]
    version: Annotated[int, msgspec.Meta(ge=0)]
    names: dict[str, str]
    scalars: dict[str, Any]
    complex: tuple[str, ...]


def encode(state: LayerState) -> list[Buffer]:
    """Encode a layer's state as a safetensors file, in pieces that share the tensors' storage: contiguous tensors on
    the CPU are not copied.

    safetensors' own writer copies every tensor twice and lets no other thread run meanwhile; the training thread must
    not wait for that. Raises ValueError for a dtype that the format cannot hold.
    """
    tensors = {name: tensor.detach().cpu().resolve_conj().resolve_neg() for name, tensor in state.tensors.items()}
    unknown = {tensor.dtype for tensor in tensors.values()} - DTYPE_NAMES.keys()
    if unknown:
        raise ValueError(f"layer {state.layer} has tensors of {min(map(str, unknown))}, which no checkpoint can hold")
    stored = {name: as_stored(tensor).contiguous() for name, tensor in tensors.items()}
    header = LayerHeader(
        format=FORMAT,
        layer=state.layer,
        version=state.version,
        names=dict(state.names),
        scalars=dict(state.scalars),
        complex=tuple(name for name, tensor in tensors.items() if tensor.is_complex()),
    )
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))  # so that each tensor is aligned
    specs = [(name, DTYPE_NAMES[stored[name].dtype], tuple(stored[name].shape), stored[name].nbytes) for name in order]
    # json, because other JSON encoders have no place for numbers that are not finite
    metadata = {_ENTRY: json.dumps(msgspec.to_builtins(header))}
    return [header_bytes(specs, metadata), *(byte_view(stored[name]) for name in order if stored[name].nbytes)]


def as_stored(tensor: Tensor) -> Tensor:
    """Return the tensor as a layer's file stores it: complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def decode(data: bytes) -> LayerState:
    """Decode a layer's file. Raises CheckpointDamaged; its text describes the damage, without the file's name."""
    header = read_header(data)[0]
    try:
        stored = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointDamaged(f"no safetensors file of a layer ({error})") from None
    for name in header.complex:
        stored[name] = torch.view_as_complex(stored[name])
    scalars: dict[str, Scalar] = header.scalars
    return LayerState(layer=header.layer, version=header.version, tensors=stored, scalars=scalars, names=header.names)


def header_size(start: bytes) -> int:
    """Return the number of bytes before the first tensor, including the length field. start: a file's first
    LENGTH_BYTES or more. Raises CheckpointDamaged.
    """
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES or length > MOST_HEADER:
        raise CheckpointDamaged("no safetensors file of a layer (its header's length)")
    return LENGTH_BYTES + length


def read_header(start: bytes) -> tuple[LayerHeader, dict[str, TensorEntry]]:
    """Return Bamboo's metadata of a layer's file, and the header entry of each tensor by name.

    start: the file's first `header_size` bytes or more. Raises CheckpointDamaged.
    """
    size = header_size(start)
    try:
        parts = msgspec.json.decode(start[LENGTH_BYTES:size], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        header = msgspec.convert(json.loads(metadata[_ENTRY]), LayerHeader)
        entries = {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in parts.items()}
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"no safetensors file of a layer ({type(error).__name__}: {error})") from None
    if header.format > FORMAT:
        raise CheckpointDamaged(f"layer file of format {header.format}, and this version of Bamboo reads {FORMAT}")
    if not all(value is None or isinstance(value, int | float) for value in header.scalars.values()):
        raise CheckpointDamaged("no safetensors file of a layer (its optimizer's numbers)")
    for name in header.complex:
        found = entries.get(name)
        if found is None or found.dtype not in ("F32", "F64") or found.shape[-1:] != (2,):
            raise CheckpointDamaged(f"no safetensors file of a layer (complex tensor {name!r})")
    return header, entries


def header_bytes(specs: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a safetensors file: its length field and header. specs: each tensor's name, dtype (as
    safetensors names it), shape and size in bytes, in file order.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, size in specs:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


_FIRST_BYTES: Final = 64 << 10  # the whole header of most layers fits


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of a stored state dict, without its data.

    layer: its file's number; in a checkpoint, the layer's. tensor: its name in that file, the same for tied entries.
    dtype, shape: as stored; a complex tensor is stored as a real one with a last dimension of two.
    """

    name: str
    layer: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    complex: bool
    bytes: int


def read_entries(store: CheckpointStore, manifest: CheckpointManifest) -> tuple[StateEntry, ...]:
    """List the tensors of a checkpoint's state dict in the model's order: "layers.0.weight" and so on. A tied parameter
    appears under each of its names.

    It reads only the header of each layer's file and does not check the sha256, so a caller that later reads a layer
    must compare it with its entries. Raises CheckpointDamaged, StoreUnavailable.
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
    """Read and check a layer's whole file. Raises CheckpointDamaged, with the file's name, or StoreUnavailable."""
    data = store.read_part(manifest, layer)
    try:
        return replace(decode(data), common=msgspec.convert(manifest.common, CommonState))
    except (CheckpointDamaged, msgspec.ValidationError) as error:
        raise CheckpointDamaged(f"{_shown(store, manifest, layer)}: {error}") from None


def by_file(entries: Sequence[StateEntry]) -> Mapping[int, tuple[StateEntry, ...]]:
    """Group entries by the number of their file (`layer`), in ascending order."""
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
