"""Writes the weights that Bamboo kept of a llama.py job in the published layout: config.json, model.safetensors.

    python export_llama.py llama.yaml weights exported --dtype bfloat16

`weights` is the folder with stage-*.safetensors. What goes with the model (tokenizer, generation settings) is copied
from the folder that training began with. The whole model passes through this machine's memory.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from llama import read_settings, settings_architecture
from llama_model import Architecture, published_name, read_json, skeleton
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bamboo_core.job.manifest import load_manifest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write trained weights in the published layout.")
    parser.add_argument("job", type=Path, help="the job's manifest")
    parser.add_argument("weights", type=Path, help="the folder with stage-*.safetensors")
    parser.add_argument("output", type=Path, help="the folder to write; new or empty")
    parser.add_argument("--model", help="where the job's task.config.model is on this machine")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors; default: as trained")
    options = parser.parse_args(arguments)
    try:
        config = dict(load_manifest(options.job).task.config)
        if options.model is not None:
            config["model"] = options.model
        count = export(config, options.weights, options.output, options.dtype)
    except ValueError as error:
        sys.exit(f"export_llama: {error}")
    print(f"{options.output}: {count} tensors in {options.dtype}")


def export(config: Mapping[str, Any], weights: Path, output: Path, dtype: str) -> int:
    """config: the job's task.config. Returns the number of tensors; ValueError for what does not fit."""
    settings = read_settings(config)
    architecture = settings_architecture(settings)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} must be a new or empty folder")
    tensors = published(architecture, trained(weights), DTYPES[dtype])
    model = Path(settings.model) if settings.model else None
    content = read_json(model / "config.json") if model else dict(settings.architecture or {})
    file, partial = output / "model.safetensors", output / ".model.safetensors.partial"
    try:
        output.mkdir(parents=True, exist_ok=True)
        for companion in [model / name for name in COMPANIONS] if model else []:
            if companion.is_file():
                shutil.copyfile(companion, output / companion.name)
        (output / "config.json").write_text(json.dumps(_described(content, dtype), indent=2) + "\n", encoding="utf-8")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {output}: {error}") from None
    return len(tensors)


def trained(weights: Path) -> dict[str, Tensor]:
    """By "layers.<layer>.<name>"."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(weights.glob("stage-*.safetensors")):
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{path} has {twice[0]}, which an earlier stage has too: they are of different jobs")
        tensors |= found
    if not tensors:
        raise ValueError(f"{weights} has no stage-*.safetensors with tensors in them")
    return tensors


def published(a: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """By published names. ValueError unless these are exactly the model's tensors."""
    result: dict[str, Tensor] = {}
    expected = dict(_expected(a))
    if missing := [key for key in expected if key not in tensors]:
        raise ValueError(f"the weights lack {missing[0]}: is a stage's file missing, or is this another model?")
    if strange := sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"the weights hold {strange[0]}, which the job's model does not have")
    for key, (name, shape) in expected.items():
        tensor = tensors[key]
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"{key} is {tensor.dtype} {list(tensor.shape)}, the job's model has torch.float32 {list(shape)}"
            )
        if not torch.equal(result.setdefault(name, tensor), tensor):
            raise ValueError(f"{key} differs from the embedding that it is tied to")
    return {name: tensor.to(dtype) for name, tensor in result.items()}


def _expected(a: Architecture) -> Iterator[tuple[str, tuple[str, torch.Size]]]:
    """Each trained tensor's name with its published name and its shape."""
    for index in range(a.blocks + 2):
        for name, empty in skeleton(a, index).state_dict().items():
            yield f"layers.{index}.{name}", (published_name(a, index, name), empty.shape)


def _described(content: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json, with the type that the tensors have now."""
    family = content.get("model_type", "llama")
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in content} or {"torch_dtype": dtype}
    return {"model_type": family, "architectures": [CLASSES[family]], **content, **named}


if __name__ == "__main__":
    main()
