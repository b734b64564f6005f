"""`bamboo export`: a checkpoint as one plain state dict that needs no Bamboo, or as a folder for transformers.

The folder is for `from_pretrained`: it has config.json, model.safetensors, and copies of the model's companions
(tokenizer, chat templates).

The export works file by file (in a checkpoint: layer by layer), so the largest file bounds memory, whatever the model's
size. The output appears under its name as a whole or not at all.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.complaints import system_reason
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.local_files import whole_file, whole_folder
from bamboo_core.text import size as bytes_in_words
from bamboo_trainer.checkpoint.layer_file import ExportError, StateEntry, by_file, header_bytes
from bamboo_trainer.checkpoint.sources import OF_MODULE, Checkpoint, StateSource, under_module_names
from bamboo_trainer.frames import DTYPES, byte_view
from bamboo_trainer.models.huggingface import AUTO, NamedModel, transformers
from bamboo_trainer.models.huggingface_files import COMPANIONS, GENERATION, SINGLE, TEMPLATES


def published_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return each tensor of the whole model once, under its first name; transformers ties its other names on loading.

    Raises ExportError for a task whose layers do not come from a split module.
    """
    found: dict[tuple[int, str], StateEntry] = {}
    names: set[str] = set()
    for entry in entries:
        match = OF_MODULE.fullmatch(entry.name)
        if match is None:
            raise ExportError(f"{entry.name} is no tensor of a model that bamboo_trainer.models.huggingface has split")
        place, name = (entry.layer, entry.tensor), match[1]
        if place not in found and name not in names:
            found[place] = replace(entry, name=name)
            names.add(name)
    return tuple(found.values())


def task_config(job: Path | None, model: Path | None, config: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return `task.config` of the job's manifest, else `config`. model: a local folder, to replace the config's model.
    Raises ExportError for an invalid manifest, and if all three are None.
    """
    from bamboo_core.job.manifest import load_manifest

    if job is None and model is None and config is None:
        raise ExportError("this format needs --job, the job's manifest, or --model, the model's folder")
    try:
        config = dict(load_manifest(job).task.config) if job else dict(config or {})
    except ValueError as error:
        raise ExportError(str(error)) from None
    if model is not None:
        config = {**{k: v for k, v in config.items() if k != "architecture"}, "model": str(model)}
    return config


def describe(model: NamedModel, dtype: torch.dtype, folder: Path) -> None:
    """Write a transformers folder without weights: config.json, tokenizer, a causal model's generation settings."""
    classes = getattr(transformers(), AUTO[model.objective][1])
    model.config.architectures = [classes[type(model.config)].__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    source = Path(model.settings.model) if model.settings.model else None
    if source:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / TEMPLATES).is_dir():
            shutil.copytree(source / TEMPLATES, folder / TEMPLATES)
    if model.objective != "causal":
        return
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    else:  # settings that follow from the model's config
        transformers().GenerationConfig.from_model_config(model.config).save_pretrained(folder)


Progress = Callable[[int, int], None]  # files done, files in total


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    step: int | None
    tensors: int
    bytes: int


def export(
    source: StateSource,
    output: Path,
    *,
    force: bool,
    progress: Progress,
    task_config: Mapping[str, Any] | None = None,
    by_layer: bool = False,
) -> Exported:
    """Export a checkpoint or weights: as one file of safetensors, or with `task_config` as a folder for transformers.
    If it raises StorageError, the output is as it was before.

    force: replace an existing output. task_config: the job's, which names the model. by_layer: use the names in the
    layers ("layers.0.module.weight") for a split module, too.
    """
    _check_output(output, task_config is not None, force)
    try:
        model = None if task_config is None else NamedModel.read(task_config)
    except ValueError as error:
        raise ExportError(f"task.config: {error}") from None
    entries = source.entries()
    if model is not None:
        entries = published_entries(entries)
    elif not by_layer:
        entries = under_module_names(source, entries)
    layout = _Layout.of(entries)
    free = shutil.disk_usage(output.absolute().parent).free
    if layout.size > free:
        needed = bytes_in_words(layout.size)
        raise ExportError(f"{output}: {needed} are needed, and {bytes_in_words(free)} are free there")
    try:
        if model is None:
            with whole_file(output) as file:
                _write(source, layout, file, progress)
        else:
            with whole_folder(output) as folder, (folder / SINGLE).open("xb") as file:
                floats = Counter[torch.dtype]()  # norms may be fp32 in a model of bf16
                for entry in entries:
                    if (dtype := DTYPES[entry.dtype]).is_floating_point:
                        floats[dtype] += entry.bytes
                describe(model, floats.most_common(1)[0][0], folder)
                _write(source, layout, file, progress)
    except OSError as error:
        raise ExportError(f"cannot write {output}: {system_reason(error)}") from None
    return Exported(step=source.step, tensors=len(entries), bytes=layout.size)


def export_weights(url: str, step: int, id: str, folder: str) -> dict[str, Any]:
    """Export a local run's checkpoint as a safetensors file with names like "layers.0.weight". folder: made if missing.
    Return {}, or {"problem": one sentence} if the checkpoint cannot be read or the file cannot be written.
    """
    try:
        store = CheckpointStore(url)
        source = Checkpoint(store, store.manifest(CheckpointId(step, id)))
        Path(folder).mkdir(exist_ok=True)
        file = Path(folder, SINGLE)
        export(source, file, force=False, progress=lambda *_: None, by_layer=True)
    except OSError as error:
        return {"problem": f"cannot write {folder}: {system_reason(error)}"}
    except StorageError as error:
        return {"problem": str(error)}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The layout of a safetensors file: its header, each entry with the offset of its bytes, and the file's size.
    A tensor with several names is written under each.
    """

    header: bytes
    places: tuple[tuple[StateEntry, int], ...]
    size: int

    @classmethod
    def of(cls, entries: Sequence[StateEntry]) -> "_Layout":
        specs = []
        ordered = sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize)  # so that each tensor is aligned
        for entry in ordered:
            if entry.complex and entry.dtype == "F64":
                raise ExportError(f"{entry.name} is of torch.complex128, which safetensors cannot hold")
            dtype, shape = ("C64", entry.shape[:-1]) if entry.complex else (entry.dtype, entry.shape)
            specs.append((entry.name, dtype, shape, entry.bytes))
        header = header_bytes(specs, {"format": "pt"})
        places, offset = [], len(header)
        for entry in ordered:
            places.append((entry, offset))
            offset += entry.bytes
        return cls(header=header, places=tuple(places), size=offset)


def _write(source: StateSource, layout: _Layout, out: BinaryIO, progress: Progress) -> None:
    """Write the file: read each file of the source once, and write its tensors at their places."""
    offsets: dict[str, int] = {entry.name: offset for entry, offset in layout.places}
    files = by_file([entry for entry, _ in layout.places])
    out.write(layout.header)
    out.truncate(layout.size)
    for number, (layer, entries) in enumerate(files.items(), start=1):
        tensors = source.tensors(layer, entries)
        for entry in entries:
            out.seek(offsets[entry.name])
            out.write(byte_view(tensors[entry.tensor]) if entry.bytes else b"")
        progress(number, len(files))


def _check_output(output: Path, as_folder: bool, force: bool) -> None:
    if output.is_dir() and not as_folder:
        raise ExportError(f"{output} is a folder; expected the name of a file")
    if os.path.lexists(output) and not force:
        raise ExportError(f"{output} exists; force replaces it")
    if not output.absolute().parent.is_dir():
        raise ExportError(f"{output}: its folder does not exist")
    if output.name in ("", ".", ".."):
        raise ExportError(f"{output}: expected a name that can be given to the output")
