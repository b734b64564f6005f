"""Exports of Hugging Face models, which transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.layer_file import encode
from bamboo_trainer.loading import load_task
from bamboo_trainer.models import huggingface
from bamboo_trainer.offline import main
from bamboo_trainer.task import Task
from bamboo_trainer.training import TrainingConfig
from checkpoint_kit import make_manifest
from from_module_kit import load_state
from manifest_kit import bamboojob, training
from reference import train
from stage_kit import chain
from transformers_kit import ENTRYPOINT, LENGTH, config_of, layers_of, run, transformers

pytest_plugins = ["transformers_kit"]


def write_checkpoint(folder: Path, task: Task, state: dict[str, Tensor]) -> None:
    """Write a checkpoint of a task with this state dict, from two stages, as workers do."""
    store, place, parts = CheckpointStore(str(folder)), CheckpointId(0, "a"), {}
    for stage in chain(task, [(0, 3), (3, 5)]):
        for number, layer in stage.values.layers.items():
            prefix = f"layers.{number}."
            layer.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
        for number, layer_state in stage.values.layer_states().items():
            parts[number] = store.write_part(place, number, encode(layer_state))
    store.commit(make_manifest(place, [parts[number] for number in sorted(parts)]))


def exported(source: Path, output: Path, **options: object) -> int:
    named = {"format": "huggingface", "output": str(output), "quiet": True, **options}
    return main("export", json.dumps(named), str(source))


@pytest.mark.parametrize(
    ("family", "objective"),
    [("gpt2", "causal"), ("qwen3", "causal"), ("bert", "masked")],
)
def test_what_was_trained_is_exported_and_loaded_by_transformers(family: str, objective: str, tmp_path: Path) -> None:
    config = config_of(family, objective=objective, learningRate=1e-2)
    task = load_task(ENTRYPOINT, config)
    plain = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=2, micro_batch_size=2)
    _, state = train(task, plain, 2)
    kept = tmp_path / "kept"
    kept.mkdir()
    if family == "gpt2":
        write_checkpoint(kept, task, state)
    else:
        save_file({k: t.clone() for k, t in state.items()}, kept / "model.safetensors")
    manifest = tmp_path / "job.yaml"
    document = {"task": {"entrypoint": ENTRYPOINT, "config": config}, "training": training(2, 4, 2)}
    manifest.write_text(json.dumps(bamboojob(**document, topology={"stages": 2})))
    out = tmp_path / "out"
    assert exported(kept, out, job=str(manifest)) == 0
    auto = getattr(transformers, huggingface.AUTO[objective][0])  # type: ignore[index]
    model, info = auto.from_pretrained(out, output_loading_info=True, local_files_only=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    layers = layers_of(task)
    load_state(layers, state)
    model.eval()
    inputs, _ = task.dataset.batch([3, 4])
    assert torch.equal(run(layers, inputs)[0], model(input_ids=inputs[0]).logits)


def test_what_lies_beside_the_model_comes_along_and_the_folder_may_be_elsewhere(
    published: Path, tmp_path: Path
) -> None:
    published = Path(shutil.copytree(published, tmp_path / "model"))
    task = huggingface.build({"model": str(published), "data": {"length": LENGTH}})
    _, state = train(
        task, TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=1, micro_batch_size=2), 1
    )
    save_file({k: t.clone() for k, t in state.items()}, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    assert exported(tmp_path, out) == 1
    assert exported(tmp_path, out, model=str(published)) == 0
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    transformers.AutoModelForCausalLM.from_pretrained(published).save_pretrained(tmp_path / "theirs")
    assert names >= {path.name for path in (tmp_path / "theirs").iterdir()}
    said = {"temperature": 0.7, "do_sample": True}
    (published / "generation_config.json").write_text(json.dumps(said))
    (published / "additional_chat_templates").mkdir()
    (published / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    save_file({k: t.bfloat16() if t.dim() > 1 else t.clone() for k, t in state.items()}, tmp_path / "model.safetensors")
    assert exported(tmp_path, out, model=str(published), force=True) == 0
    assert transformers.GenerationConfig.from_pretrained(out).temperature == 0.7
    assert (out / "additional_chat_templates" / "rag.jinja").is_file()
    described = json.loads((out / "config.json").read_text())
    assert (described["architectures"], described["dtype"]) == (["GPT2LMHeadModel"], "bfloat16")
