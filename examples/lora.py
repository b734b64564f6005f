"""Low-rank adapters beside the attention of any causal model of transformers; all else of the model stays frozen.

The config is that of bamboo_trainer.models.huggingface, and `lora`: {rank, alpha, dropout, targets}.
"""

from collections.abc import Mapping
from typing import Any

from bamboo_trainer.lora import with_lora
from bamboo_trainer.models import huggingface
from bamboo_trainer.task import Task, TrainingFacts


def build(config: Mapping[str, Any], training: TrainingFacts) -> Task:
    """Raises ValueError, naming the key and what was expected."""
    model = {key: value for key, value in config.items() if key != "lora"}
    adapters = {"rank": 8, "alpha": 16.0, "targets": ["*q_proj", "*v_proj"], **config.get("lora", {})}
    unknown = adapters.keys() - {"rank", "alpha", "dropout", "targets"}
    if unknown:
        raise ValueError(f"lora: unknown key {min(unknown)!r}, expected some of rank, alpha, dropout, targets")
    return with_lora(huggingface.build(model, training), **adapters)
