"""Models of transformers."""

from typing import Any

import pytest
from torch import Tensor, nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer, call_layer, run_layer

transformers = pytest.importorskip("transformers")


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


def layers_of(task: Task) -> list[nn.Module]:
    layers = [build_layer(task, 0, n) for n in range(len(task.layers))]
    tie(dict(enumerate(layers)), tied_groups(task), task, 0)
    return layers


def state_of(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {k.removeprefix("module."): t for layer in layers for k, t in layer.state_dict().items()}


def run(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    passed: Any = inputs
    for number, layer in enumerate(layers):
        passed = run_layer(layer, number, passed, lambda given, layer=layer: call_layer(layer, given))
    return tuple(passed)
