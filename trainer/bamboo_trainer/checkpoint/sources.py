"""What can be exported: a checkpoint, or the weights that a run has kept. Both are files of a state dict's tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.state_dict import StateEntry, read_entries, read_layer
from bamboo_trainer.checkpoint.weights_folder import STAGE_FILES, stages_of

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StateSource(Protocol):
    """entries: of the whole state dict; their `layer` numbers a file. step: None if it is not known."""

    @property
    def step(self) -> int | None: ...

    def entries(self) -> tuple[StateEntry, ...]: ...

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        """The tensors of these entries of one file, by name, as they are stored. Raises StorageError."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """averaged: the averages of trained parameters instead of them."""

    store: CheckpointStore
    manifest: CheckpointManifest
    averaged: bool = False

    @property
    def step(self) -> int:
        return self.manifest.step

    def entries(self) -> tuple[StateEntry, ...]:
        return read_entries(self.store, self.manifest, averaged=self.averaged)

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        """A layer's, after a comparison with what the file's beginning said."""
        state = read_layer(self.store, self.manifest, file)
        stored = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in state.tensors.items()}
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
                self._check(path, file.metadata())
                for name in file.keys():  # noqa: SIM118
                    if name in found:
                        raise CheckpointError(f"{path} has {name}, which {self._files[found[name].layer]} has too")
                    found[name] = _entry(path, number, name, file.get_slice(name))
        return tuple(found.values())

    def tensors(self, file: int, entries: Sequence[StateEntry]) -> Mapping[str, Tensor]:
        with _opened(self._files[file]) as opened:
            return {entry.tensor: opened.get_tensor(entry.tensor) for entry in entries}

    def _check(self, path: Path, metadata: Mapping[str, Any] | None) -> None:
        """Raises CheckpointError if that file does not belong to the others."""


class WeightsFolder(TensorFiles):
    """What `bamboo run --output` and jobs on a cluster leave: a file for each stage."""

    def __init__(self, folder: Path) -> None:
        super().__init__(sorted(folder.glob(STAGE_FILES)))

    @staticmethod
    def is_one(folder: Path) -> bool:
        return folder.is_dir() and any(folder.glob(STAGE_FILES))

    def _check(self, path: Path, metadata: Mapping[str, Any] | None) -> None:
        try:
            stages = stages_of(metadata)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if stages not in (None, len(self._files)):
            raise CheckpointError(
                f"{path} is one of {stages} files of weights, and {len(self._files)} are in its folder"
            )


def _entry(path: Path, number: int, name: str, part: Any) -> StateEntry:
    dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} in {path} is of type {dtype}, which cannot be used here")
    size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
    return StateEntry(name=name, layer=number, tensor=name, dtype=dtype, shape=shape, complex="", bytes=size)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {said_by(error)}") from None


def open_source(url: str, step: int | None, *, averaged: bool) -> tuple[StateSource, list[str]]:
    """What a URL or a folder holds: final weights, or the checkpoint of that step, None for the newest; and which
    newer ones were passed over, and why. Raises StorageError, ExportError.
    """
    if step is None and WeightsFolder.is_one(Path(url)):
        if averaged:
            raise ExportError(f"{url} has final weights only; averages are in checkpoints")
        return WeightsFolder(Path(url)), []
    store = CheckpointStore(url)
    manifest, passed = find(store.list(), store.shown, step)
    return Checkpoint(store, manifest, averaged), list(passed)
