"""Code shared by the ready-made models: config, optimizer, schedule, and seeds of made-up data."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from bamboo_trainer import schedules
from bamboo_trainer.data import pure_seed
from bamboo_trainer.data.config_keys import require_known, typed
from bamboo_trainer.task import Dataset, Evaluation, Metric, TrainingFacts

MADE_UP: Final = "random"
HELD_OUT: Final = 1 << 40  # the first seed of made-up data for an evaluation
TRAINING: Final[dict[str, Any]] = {"learningRate": 1e-3, "warmupSteps": 0, "weightDecay": 0.0, "checkpoint": False}

Named = Iterable[tuple[str, nn.Parameter]]


def read(config: Mapping[str, Any], sizes: Mapping[str, Mapping[str, Any]], default: str) -> dict[str, Any]:
    """Return a model's settings: the preset `size`, with the defaults of `TRAINING`, overridden by the config.

    sizes: the presets by name. default: the name used if the config has no `size`. Raises ValueError, naming the key
    and what was expected.
    """
    size = config.get("size", default)
    if size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, got {size!r}")
    known = {**TRAINING, **sizes[size], "data": {}, "evaluation": {}}
    require_known(config, {"size": size, **known})
    kinds = {"size": str, **{key: Mapping if default == {} else type(default) for key, default in known.items()}}
    values = {key: typed(key, value, kinds[key]) for key, value in config.items()}
    for key, value in values.items():
        if type(value) in (int, float) and value < 0:
            raise ValueError(f"{key} must not be negative, got {value}")
    return {**known, "evaluation": None, **values}


def made_up_seed(where: str) -> int:
    """Return the first seed of made-up data. where: the config's key of the data, each of which gives other data."""
    known = {"data": 0, "evaluation": HELD_OUT}
    return known[where] if where in known else pure_seed(where)


def whole_numbers(values: Mapping[str, Any], *keys: str) -> None:
    """Raise ValueError, naming the key, unless each value is at least 1."""
    for key in keys:
        if values[key] < 1:
            raise ValueError(f"{key} must be at least 1, got {values[key]}")


def rate(values: Mapping[str, Any], training: TrainingFacts | None, dataset: Dataset) -> Callable[[int], float]:
    """Return a learning rate schedule: linear warm-up, then cosine decay to a tenth of the rate at the job's last step;
    constant after the warm-up if `training` is None. values: from `read`. Raises ValueError for a rate of 0.
    """
    peak, warmup = values["learningRate"], values["warmupSteps"]
    if peak <= 0:
        raise ValueError(f"learningRate must be positive, got {peak}")
    if training is None:
        return schedules.constant(peak, warmup)
    steps = training.steps_with(dataset, getattr(dataset, "tokens_per_sample", None))
    return schedules.cosine(peak, steps=max(steps, warmup + 1), warmup=warmup, final=0.1 * peak)


def decaying(named: Named, decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, with weight decay for matrices and without it for norms and biases. Empty
    groups are left out.
    """
    parameters = [p for _, p in named]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(values: Mapping[str, Any], named: Named) -> torch.optim.Optimizer:
    """Return AdamW. values: the settings from `read`. named: parameters by name."""
    return torch.optim.AdamW(decaying(named, values["weightDecay"]), lr=values["learningRate"], betas=(0.9, 0.95))


def evaluation(
    config: Mapping[str, Any] | None,
    opened: Callable[[Mapping[str, Any]], Dataset],
    accuracy: Metric,
) -> Evaluation | None:
    """Return a task's evaluation, with the metric accuracy; None if there is no config. config: of the data, which
    `opened` opens.
    """
    if config is None:
        return None
    return Evaluation(dataset=opened(config), metrics={"accuracy": accuracy})
