"""`bamboo export --format huggingface`: the folder that transformers' `from_pretrained` loads.

config.json, model.safetensors, and what goes with the model (its tokenizer, settings for generation), which is copied.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bamboo_trainer.checkpoint.errors import ExportError
from bamboo_trainer.checkpoint.state_dict import StateEntry
from bamboo_trainer.models.huggingface import AUTO, objective_of, published_config, read_settings, transformers

WEIGHTS: Final = "model.safetensors"
MODULE: Final = "module."  # before the model's own names in a split layer
COMPANIONS: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
)
GENERATION: Final = "generation_config.json"
TEMPLATES: Final = "additional_chat_templates"  # a folder


def published_entries(entries: Sequence[StateEntry]) -> tuple[StateEntry, ...]:
    """Under the model's own names. Of a tensor with several names only the first one: transformers ties the others.

    Raises ExportError.
    """
    found: dict[tuple[int, str], StateEntry] = {}
    names: set[str] = set()
    for entry in entries:
        _, _, inner = entry.name.removeprefix("layers.").partition(".")
        name = inner.removeprefix(MODULE)
        if not entry.name.startswith("layers.") or name == inner:
            raise ExportError(f"{entry.name} is no tensor of a model that bamboo_trainer.models.huggingface has split")
        place = entry.layer, entry.tensor
        if place not in found and name not in names:
            found[place] = replace(entry, name=name)
            names.add(name)
    return tuple(found.values())


def task_config(job: Path | None, model: Path | None) -> Mapping[str, Any]:
    """The task.config of the job's manifest. model: where the folder it names is on this machine."""
    from bamboo_core.job.manifest import load_manifest

    if job is None and model is None:
        raise ExportError("the format huggingface needs --job, the job's manifest, or --model, the model's folder")
    try:
        config = dict(load_manifest(job).task.config) if job else {}
    except ValueError as error:
        raise ExportError(str(error)) from None
    if model is not None:
        config = {**{k: v for k, v in config.items() if k != "architecture"}, "model": str(model)}
    return config


def describe(config: Mapping[str, Any], folder: Path) -> None:
    """Everything of the folder but the weights. config: the job's task.config. Raises ExportError."""
    try:
        settings = read_settings(config)
        published = published_config(settings)
        objective = settings.objective or objective_of(published)
    except ValueError as error:
        raise ExportError(f"task.config: {error}") from None
    classes = getattr(transformers(), AUTO[objective][1])
    published.architectures = [classes[type(published)].__name__]
    published.dtype = "float32"
    published.save_pretrained(folder)
    source = Path(settings.model) if settings.model else None
    if source:
        _copy_companions(source, folder)
    if objective == "causal":
        _write_generation(source, published, folder)


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)


def _write_generation(source: Path | None, published: Any, folder: Path) -> None:
    """As `save_pretrained` has them: the folder's settings for generation, or those that follow from the config."""
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    else:
        transformers().GenerationConfig.from_model_config(published).save_pretrained(folder)
