"""The opening of the weights that `task.initialFrom` names: a folder, a file or a checkpoint, of which it reads
headers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bamboo_core.job.spec import InitialSpec
from bamboo_core.storage.errors import StorageError
from bamboo_core.storage.url import parse_url
from bamboo_trainer.checkpoint.adapters import MergedSource
from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.sources import (
    OF_MODULE,
    StateSource,
    TensorFiles,
    has_tensors,
    open_source,
    tensor_files,
)
from bamboo_trainer.checkpoint.state_dict import StateEntry
from bamboo_trainer.initial.matching import FIELD, OfferedTensor
from bamboo_trainer.tasks.task_errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The opened weights. shown: where they are, for messages. adapters: how many are merged into them."""

    source: StateSource
    shown: str
    adapters: int = 0

    def with_merged_adapters(self) -> "Opened":
        """Return the weights with adapters of `bamboo_trainer.lora` merged into them. Raises TaskError."""
        try:
            merged = MergedSource(self.source)
        except (StorageError, ExportError) as error:
            raise TaskError(f"{FIELD}: {error}") from None
        return replace(self, source=merged, adapters=merged.count)

    def offered(self, *, of_module: bool) -> list[OfferedTensor]:
        """Return the tensors of the weights. of_module: by their names in the whole module, where one was split."""
        try:
            entries = self.source.entries()
        except (StorageError, ExportError) as error:
            raise TaskError(f"{FIELD}: {error}") from None
        inner = [OF_MODULE.fullmatch(entry.name) for entry in entries]
        by_name: dict[str, list[StateEntry]] = {}
        for entry, match in zip(entries, inner, strict=True):
            name = match[1] if match and of_module and all(inner) else entry.name
            by_name.setdefault(name, []).append(entry)
        return [_offered(name, found) for name, found in by_name.items()]


def open_weights(spec: InitialSpec) -> Opened:
    """Open the weights. Raises TaskError, in a sentence, if nothing is there or it cannot be read."""
    try:
        url = parse_url(spec.url, f"{FIELD}.url")
        files = _files(Path(url.path)) if url.protocol == "file" else None
    except ValueError as error:
        raise TaskError(f"{FIELD}.url: {error}" if FIELD not in str(error) else str(error)) from None
    if files is not None:
        if spec.step is not None:
            raise TaskError(f"{FIELD}.step: expected only with checkpoints, and {url.shown} has weights")
        return Opened(source=files, shown=url.shown)
    try:
        if spec.step is None:
            source, _ = open_source(spec.url, None)
            newest = f"the newest one in {url.shown} is of step {source.step}"
            raise TaskError(f"{FIELD}.step: expected the step of a checkpoint; {newest}")
        source, _ = open_source(spec.url, spec.step)
    except (StorageError, ExportError) as error:
        raise TaskError(f"{FIELD}: {error}") from None
    return Opened(source=source, shown=f"the checkpoint of step {spec.step} in {url.shown}")


def _files(path: Path) -> TensorFiles | None:
    """Return files of weights; None for checkpoints or unknown content. Raises ValueError if nothing is there."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    found = tensor_files(path)
    if found is None and has_tensors(path / "weights"):
        raise ValueError(f"expected a folder of weights, such as {path / 'weights'}, got {path}")
    return found


def _offered(name: str, entries: Sequence[StateEntry]) -> OfferedTensor:
    """Return the entries as one tensor. Raises TaskError if they cannot be one."""
    if len({(entry.shape, entry.dtype, entry.complex) for entry in entries}) > 1:
        raise TaskError(f"{FIELD}: {' and '.join(entry.name for entry in entries[:2])} would both be {name}")
    return OfferedTensor(name=name, entries=tuple(entries))
