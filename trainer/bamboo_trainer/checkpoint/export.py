"""`bamboo export`: a checkpoint as one plain state dict that needs no Bamboo, or as a folder for other tools.

`ExportForm` names the forms. For transformers' `from_pretrained` a folder has config.json, model.safetensors, and
copies of the model's companions (tokenizer, settings for generation); for PEFT it has only the adapters.

The export works layer by layer, so the largest layer's file bounds memory, whatever the model's size. The output
appears under its name as a whole or not at all.
"""

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import torch

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.complaints import system_reason
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.local_files import whole_file, whole_folder
from bamboo_core.text import size as bytes_in_words
from bamboo_trainer.checkpoint import sources
from bamboo_trainer.checkpoint.layer_file import ExportError, StateEntry, by_file, header_bytes
from bamboo_trainer.checkpoint.sources import OF_MODULE, Checkpoint, StateSource, under_module_names
from bamboo_trainer.frames import DTYPES, byte_view
from bamboo_trainer.models.huggingface import AUTO, NamedModel, lora_settings, transformers
from bamboo_trainer.models.huggingface_files import (
    COMPANIONS,
    CONFIG,
    GENERATION,
    MODULE,
    SINGLE,
    TEMPLATES,
    WEIGHTS,
    PeftAdapter,
)

_TASK_TYPES: Final = {"causal": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS"}  # of PEFT, by objective


def inner_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return the entries under their names in the whole model. Raises ExportError for a model that was not split."""
    renamed = []
    for entry in entries:
        match = OF_MODULE.fullmatch(entry.name)
        if match is None:
            raise ExportError(f"{entry.name} is no tensor of a model that bamboo_trainer.models.huggingface has split")
        renamed.append(replace(entry, name=match[1]))
    return tuple(renamed)


def published_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return each stored tensor once, under its first name in the whole model; transformers ties the others on loading.

    Raises ExportError for a model that was not split.
    """
    found: dict[tuple[int, str], StateEntry] = {}
    names: set[str] = set()
    for entry in inner_entries(entries):
        place = entry.layer, entry.tensor
        if place not in found and entry.name not in names:
            found[place] = entry
            names.add(entry.name)
    return tuple(found.values())


def task_config(job: Path | None, model: Path | None, config: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the task.config: the given one, or the job manifest's. model: the path of the model's folder on this
    machine.
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


class ModelToExport(NamedModel):
    """The model of transformers that an export is for, and the files that describe it."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Read the model's config. config: the job's task.config. Raises ExportError."""
        try:
            return super().read(config)
        except ValueError as error:
            raise ExportError(f"task.config: {error}") from None

    def describe(self, folder: Path) -> None:
        """Write config.json, the generation settings and the model's companions: all files but the weights."""
        classes = getattr(transformers(), AUTO[self.objective][1])
        self.config.architectures = [classes[type(self.config)].__name__]
        self.config.dtype = "float32"
        self.config.save_pretrained(folder)
        source = Path(self.settings.model) if self.settings.model else None
        if source:
            for name in COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
            if (source / TEMPLATES).is_dir():
                shutil.copytree(source / TEMPLATES, folder / TEMPLATES)
        if self.objective == "causal":
            _write_generation(source, self.config, folder)

    def trained(self, entries: Sequence[StateEntry]) -> set[str]:
        """Return the names of parameters trained in addition to adapters. entries: under the model's own names."""
        names = [entry.name for entry in entries if not re.search(r"\.lora_|\.base\.", entry.name)]
        return {name.removeprefix(MODULE) for name in self.trained_beside(names)}

    def describe_adapters(self, source: StateSource, entries: Sequence[StateEntry], folder: Path) -> None:
        """Write PEFT's adapter_config.json. source: gives the scales. entries: under the model's own names."""
        adapters = sources.adapters_in(entries)
        scales: dict[str, float] = {}
        for file, found in by_file([one.scale for one in adapters]).items():
            tensors = source.tensors(file, found)
            scales |= {entry.name: float(tensors[entry.tensor]) for entry in found}
        ranks = {one.name: one.a.shape[0] for one in adapters}
        alphas = {one.name: _alpha(scales[one.scale.name], ranks[one.name]) for one in adapters}
        (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
        lora = lora_settings(self.settings.lora or {})
        dropout = PeftAdapter.read(Path(lora.adapter), lora.dropout).dropout if lora.adapter else lora.dropout
        config = {
            "peft_type": "LORA",
            "task_type": _TASK_TYPES.get(self.objective),
            "base_model_name_or_path": self.settings.published_as,
            "revision": self.settings.revision,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout or 0.0,
            "target_modules": _targets(ranks, entries),
            "modules_to_save": sorted({name.rpartition(".")[0] for name in self.trained(entries)}) or None,
            "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
            "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _alpha(scale: float, rank: int) -> float:
    """Return the lora_alpha with alpha / rank = scale in fp32: a number of six digits if it is exact enough."""
    short = float(f"{scale * rank:.6g}")
    found = short if float(torch.tensor(short / rank, dtype=torch.float32)) == scale else scale * rank
    return int(found) if math.isfinite(found) and found == int(found) else found


def _targets(adapted: Collection[str], entries: Sequence[StateEntry]) -> list[str]:
    """Return PEFT's target_modules: the last part of a module's name if all modules of that name have adapters, else
    the whole name.
    """
    weights = {entry.name for entry in entries if entry.name.endswith(".weight")}
    others = {n.removesuffix(".weight").rpartition(".")[2] for n in weights if not n.endswith(".base.weight")}
    leaves = {name: name.rpartition(".")[2] for name in adapted}
    return sorted({name if leaf in others else leaf for name, leaf in leaves.items()})


def _write_generation(source: Path | None, published: Any, folder: Path) -> None:
    """Write generation_config.json: a copy of the source folder's, or else settings that follow from the model's
    config.
    """
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    else:
        transformers().GenerationConfig.from_model_config(published).save_pretrained(folder)


Progress = Callable[[int, int], None]  # files done, files in total


class ExportForm(StrEnum):
    """The form of an export.

    safetensors: one file. huggingface: a folder for transformers' `from_pretrained`. peft: a folder for PEFT's, with
    only the adapters.
    """

    SAFETENSORS = "safetensors"
    HUGGINGFACE = "huggingface"
    PEFT = "peft"

    @property
    def of_model(self) -> bool:
        """Whether the export is a folder, which needs the model."""
        return self is not ExportForm.SAFETENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    step: int | None
    tensors: int
    bytes: int


def export(
    source: StateSource,
    form: ExportForm,
    output: Path,
    *,
    force: bool,
    progress: Progress,
    task_config: Mapping[str, Any] | None = None,
    by_layer: bool = False,
) -> Exported:
    """Export a checkpoint or weights. If it raises StorageError or ExportError, the output is as it was before.

    force: replace an existing output. task_config: the job's, for a form that needs the model. by_layer: use the names
    in the layers ("layers.0.module.weight") for a split module, too.
    """
    _check_output(output, form, force)
    model = ModelToExport.read(task_config or {}) if form.of_model else None
    if model is None:
        entries = source.entries() if by_layer else under_module_names(source, source.entries())
    elif form is ExportForm.HUGGINGFACE:
        source = sources.MergedSource(source)
        entries, weights, describe = published_entries(source.entries()), SINGLE, model.describe
    else:
        known = inner_entries(source.entries())
        entries, weights = sources.peft_entries(known, model.trained(known)), WEIGHTS
        describe = partial(model.describe_adapters, source, known)
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
            with whole_folder(output) as folder, (folder / weights).open("xb") as file:
                describe(folder)
                _write(source, layout, file, progress)
    except OSError as error:
        raise ExportError(f"cannot write {output}: {system_reason(error)}") from None
    return Exported(step=source.step, tensors=len(entries), bytes=layout.size)


def export_weights(url: str, step: int, id: str, folder: str) -> dict[str, Any]:
    """Export a checkpoint into a new folder, as one file of safetensors with the names in the layers, for a local
    run. Return {}, or {"problem": one sentence} if it cannot be read or written.
    """
    try:
        store = CheckpointStore(url)
        source = Checkpoint(store, store.manifest(CheckpointId(step, id)))
        Path(folder).mkdir(exist_ok=True)
        file = Path(folder, SINGLE)
        export(source, ExportForm.SAFETENSORS, file, force=False, progress=lambda *_: None, by_layer=True)
    except OSError as error:
        return {"problem": f"cannot write {folder}: {system_reason(error)}"}
    except (StorageError, ExportError) as error:
        return {"problem": str(error)}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The layout of a safetensors file: its header, and where each entry's bytes begin. A tensor with several names is
    written under each.
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
    """Read and check each file of the source once, and write its tensors at their places."""
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


def _check_output(output: Path, form: ExportForm, force: bool) -> None:
    if output.is_dir() and not form.of_model:
        raise ExportError(f"{output} is a folder; expected the name of a file")
    if os.path.lexists(output) and not force:
        raise ExportError(f"{output} exists; force replaces it")
    if not output.absolute().parent.is_dir():
        raise ExportError(f"{output}: its folder does not exist")
    if output.name in ("", ".", ".."):
        raise ExportError(f"{output}: expected a name that can be given to the output")
