"""Exports for Hugging Face: a folder for transformers' `from_pretrained`, or one for PEFT.

The first has config.json, model.safetensors, and copies of the model's companions (tokenizer, settings for generation);
the second only adapters.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.state_dict import StateEntry
from bamboo_trainer.models.huggingface import (
    AUTO,
    HuggingFaceSettings,
    Objective,
    lora_settings,
    objective_of,
    published_config,
    read_settings,
    trained_beside,
    transformers,
)
from bamboo_trainer.models.parts.hub_models import COMPANIONS, GENERATION, TEMPLATES
from bamboo_trainer.models.parts.peft_files import MODULE, PeftAdapter

WEIGHTS: Final = "model.safetensors"


def inner_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return the entries under the model's own names. Raises ExportError for a model that was not split."""
    renamed = []
    for entry in entries:
        _, _, inner = entry.name.removeprefix("layers.").partition(".")
        name = inner.removeprefix(MODULE)
        if not entry.name.startswith("layers.") or name == inner:
            raise ExportError(f"{entry.name} is no tensor of a model that bamboo_trainer.models.huggingface has split")
        renamed.append(replace(entry, name=name))
    return tuple(renamed)


def published_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Return the entries without further names of a tensor: transformers ties those. Raises ExportError."""
    found: dict[tuple[int, str], StateEntry] = {}
    names: set[str] = set()
    for entry in inner_entries(entries):
        place = entry.layer, entry.tensor
        if place not in found and entry.name not in names:
            found[place] = entry
            names.add(entry.name)
    return tuple(found.values())


def task_config(job: Path | None, model: Path | None, config: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the task.config: the given one, or the job manifest's. model: where the folder that it names is on this
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelToExport:
    """The model in a job's task.config. config: transformers' config."""

    settings: HuggingFaceSettings
    config: Any
    objective: Objective

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "ModelToExport":
        """Read the model. config: the job's task.config. Raises ExportError."""
        try:
            settings = read_settings(config)
            published = published_config(settings)
            objective = settings.objective or objective_of(published)
        except ValueError as error:
            raise ExportError(f"task.config: {error}") from None
        return cls(settings=settings, config=published, objective=objective)

    def describe(self, folder: Path) -> None:
        """Write all files of the folder except the weights."""
        classes = getattr(transformers(), AUTO[self.objective][1])
        self.config.architectures = [classes[type(self.config)].__name__]
        self.config.dtype = "float32"
        self.config.save_pretrained(folder)
        source = Path(self.settings.model) if self.settings.model else None
        if source:
            _copy_companions(source, folder)
        if self.objective == "causal":
            _write_generation(source, self.config, folder)

    def trained(self, entries: Sequence[StateEntry]) -> set[str]:
        """Return the names of other trained parameters than adapters. entries: under the model's own names."""
        names = [entry.name for entry in entries if not re.search(r"\.lora_|\.base\.", entry.name)]
        beside = trained_beside(self.settings, self.objective, self.config, names)
        return {name.removeprefix(MODULE) for name in beside}

    @property
    def _base(self) -> Mapping[str, str | None]:
        return {"base": self.settings.published_as, "revision": self.settings.revision}

    @property
    def adapter_facts(self) -> Mapping[str, Any]:
        """The facts about adapters that `adapters.describe` writes in addition to their tensors."""
        given = lora_settings(self.settings.lora or {})
        dropout = given.dropout
        if dropout is None and given.adapter:
            dropout = PeftAdapter.read(Path(given.adapter)).dropout
        return {"objective": self.objective, "dropout": dropout or 0.0, **self._base}


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)


def _write_generation(source: Path | None, published: Any, folder: Path) -> None:
    """Write the generation settings as `save_pretrained` does: the folder's, or else settings that follow from the
    config.
    """
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    else:
        transformers().GenerationConfig.from_model_config(published).save_pretrained(folder)
