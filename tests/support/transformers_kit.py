"""Small models of Hugging Face transformers, and the comparison of each with its split layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_trainer.loading import load_task
from bamboo_trainer.models import huggingface
from bamboo_trainer.task import Task, Weighted
from bamboo_trainer.tasks.task_errors import TaskError
from from_module_kit import check_gradients, layers_of, run, state_of

transformers = pytest.importorskip("transformers")


ENTRYPOINT = "bamboo_trainer.models.huggingface:build"
WORDS, LENGTH = 64, 12


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": WORDS,
}


GROUPED = {**SMALL, "num_key_value_heads": 2}


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": WORDS, "n_positions": 32},
    "llama": GROUPED,
    "qwen2": GROUPED
    | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": GROUPED | {"head_dim": 8},
    "bert": SMALL,
    "mistral": GROUPED | {"sliding_window": 6},
    "gemma3_text": GROUPED
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "modernbert": SMALL | {"pad_token_id": 0, "local_attention": 8},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {"hidden_size": 16, "n_layer": 3, "n_head": 4, "vocab_size": WORDS},
    "llama4_text": GROUPED | {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 24},
    "mamba2": {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "vocab_size": WORDS,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "jetmoe": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 4},
}


def config_of(family: str, **more: Any) -> dict[str, Any]:
    data = {"length": LENGTH, "samples": 64, **more.pop("data", {})}
    return {"architecture": {"model_type": family, **FAMILIES[family]}, "data": data, **more}


def refused(config: dict[str, Any]) -> str:
    """Return the message with which `build` refuses a config."""
    with pytest.raises(TaskError) as error:
        load_task(ENTRYPOINT, config)
    assert "\n" not in str(error.value)
    return str(error.value)


def pair_of(config: dict[str, Any]) -> tuple[Task, list[nn.Module], Any]:
    """Return the task, its layers, and transformers' unsplit model with the layers' values, in eval mode."""
    task = huggingface.build(config)
    layers, model = layers_of(task), huggingface.NamedModel.read(config).make()
    assert not model.load_state_dict(state_of(layers), strict=False).missing_keys
    for module in (*layers, model):
        module.eval()
    return task, layers, model


def check_as_transformers(config: dict[str, Any]) -> None:
    """Check that the task's unmasked logits equal those of transformers, and that loss and gradients are close."""
    task, layers, model = pair_of(config)
    inputs, (labels,) = task.dataset.batch([1, 5, 7])
    mask = inputs[1] if len(inputs) > 1 else None
    shifted = {"shift_labels": labels} if huggingface.NamedModel.read(config).objective == "causal" else {}
    output = model(input_ids=inputs[0], attention_mask=mask, labels=labels, **shifted)
    (logits,) = run(layers, inputs)
    counts = mask.bool() if mask is not None else slice(None)
    assert torch.equal(logits[counts], output.logits[counts])
    weighted = task.loss((logits,), (labels,))
    assert isinstance(weighted, Weighted)
    loss = weighted.total / weighted.weight
    torch.testing.assert_close(loss, output.loss)
    loss.backward()
    output.loss.backward()
    assert sum(p.grad is not None for p in model.parameters()) > 20
    check_gradients(layers, model)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a bf16 model as it is published: several weight files, their index, a tokenizer's file."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(3)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILIES["gpt2"])).to(torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "tokenizer.json").write_text("{}")
    return folder
