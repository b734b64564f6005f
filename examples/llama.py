"""A published model of the Llama family as a task: `build` is what task.entrypoint names, llama:build.

    cd examples && bamboo validate llama.yaml

llama_model.py has the layers, tokenize_text.py writes the tokens, and export_llama.py writes trained weights in the
published layout.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llama_model import Architecture, Weights, expect, make_layer, read_architecture, read_json
from torch import Tensor, nn

from bamboo_trainer.models.typed_config import typed_values
from bamboo_trainer.task import Parts, Task

TOKEN_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Tokens:
    """Sample i: window i of `context` ids and, as targets, the same shifted by one. Documents follow each other.

    path: a .npy file of uint16 or uint32, whose header says which; or nothing but ids, of the type that `kind` says.
    """

    def __init__(self, path: Path, kind: str | None, context: int, vocabulary: int) -> None:
        self._path, self._context, self._vocabulary = path, context, vocabulary
        self._ids = _mapped(path, kind)
        highest = np.iinfo(self._ids.dtype).max
        if vocabulary > highest + 1:
            raise ValueError(f"tokens: {path} has {self._ids.dtype}, too small for a vocabulary of {vocabulary}")
        if len(self._ids) <= context:
            raise ValueError(f"tokens: {path} has {len(self._ids)} ids, fewer than context + 1 = {context + 1}")

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._context

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        """Inputs and targets, both int64 [samples, context]."""
        width = self._context
        windows = np.stack([self._ids[i * width : (i + 1) * width + 1] for i in indices]).astype(np.int64)
        if (highest := int(windows.max())) >= self._vocabulary:
            raise ValueError(f"{self._path} has the id {highest}, outside the vocabulary of {self._vocabulary}")
        ids = torch.from_numpy(windows)
        return (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """task.config. Either model (a folder) or architecture (what a config.json has, for random first values).

    steps: where the cosine ends, at a tenth of the rate; without it the rate stays.
    """

    tokens: str = ""
    token_type: str | None = None
    model: str | None = None
    architecture: Mapping[str, Any] | None = None
    context: int = 2048
    learning_rate: float = 2e-5
    warmup_steps: int = 100
    steps: int | None = None
    weight_decay: float = 0.1
    checkpoint: bool = False

    def __post_init__(self) -> None:
        expect(self.tokens != "", "tokens must name a file of token ids")
        expect(self.token_type in (None, *TOKEN_TYPES), f"tokenType must be uint16 or uint32, got {self.token_type!r}")
        expect((self.model is None) != (self.architecture is None), "expected exactly one of model and architecture")
        expect(self.context >= 1, f"context must be at least 1, got {self.context}")
        expect(self.learning_rate > 0, f"learningRate must be positive, got {self.learning_rate}")
        expect(self.warmup_steps >= 0, f"warmupSteps must be at least 0, got {self.warmup_steps}")
        expect(self.steps is None or self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        expect(self.weight_decay >= 0, f"weightDecay must be at least 0, got {self.weight_decay}")


_KEYS: dict[str, tuple[str, type]] = {
    "tokens": ("tokens", str),
    "tokenType": ("token_type", str),
    "model": ("model", str),
    "architecture": ("architecture", Mapping),
    "context": ("context", int),
    "learningRate": ("learning_rate", float),
    "warmupSteps": ("warmup_steps", int),
    "steps": ("steps", int),
    "weightDecay": ("weight_decay", float),
    "checkpoint": ("checkpoint", bool),
}


def build(config: Mapping[str, Any]) -> Task:
    """Raises ValueError, in a sentence for the user, for a config, a folder or a file that cannot be."""
    settings = read_settings(config)
    architecture = settings_architecture(settings)
    weights = None
    if settings.model is not None:
        weights = Weights(Path(settings.model))
        weights.check(architecture)
    last = architecture.blocks + 1
    return Task(
        layers=[partial(make_layer, architecture, weights, index) for index in range(last + 1)],
        loss=loss,
        dataset=Tokens(Path(settings.tokens), settings.token_type, settings.context, architecture.vocab_size),
        optimizer=partial(optimizer, settings),
        learning_rate=partial(learning_rate, settings),
        tied=(("0.embed_tokens.weight", f"{last}.lm_head.weight"),) if architecture.tied else (),
        checkpointed=range(1, last) if settings.checkpoint else (),
    )


def read_settings(config: Mapping[str, Any]) -> Settings:
    return Settings(**typed_values(config, _KEYS))


def settings_architecture(settings: Settings) -> Architecture:
    if settings.model is None:
        architecture = read_architecture(settings.architecture or {}, "architecture")
    else:
        path = Path(settings.model) / "config.json"
        architecture = read_architecture(read_json(path), f"model: {path}")
    most = min(architecture.positions, architecture.window or architecture.positions)
    expect(settings.context <= most, f"context must be at most the model's {most} positions, got {settings.context}")
    return architecture


def loss(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())


def optimizer(settings: Settings, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and biases do not. A group may come out empty on some stage."""
    parameters = [p for _, p in named]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95))


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the rate at `steps`."""
    rate, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return rate * (step + 1) / warmup
    if settings.steps is None:
        return rate
    progress = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _mapped(path: Path, kind: str | None) -> np.ndarray[Any, Any]:
    """Nothing is read before it is asked for."""
    ids: np.ndarray[Any, Any]
    try:
        if path.suffix == ".npy":
            ids = np.lib.format.open_memmap(path, mode="r")
        elif kind is None:
            raise ValueError("tokenType must say of which type the ids are, since this is no .npy file")
        else:
            ids = np.memmap(path, TOKEN_TYPES[kind], mode="r")
    except OSError as error:
        raise ValueError(f"tokens: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"tokens: cannot read {path}: {error}") from None
    if ids.ndim != 1 or ids.dtype not in TOKEN_TYPES.values():
        raise ValueError(f"tokens: {path} must be one row of uint16 or uint32, got {ids.dtype} {list(ids.shape)}")
    if kind is not None and ids.dtype != TOKEN_TYPES[kind]:
        raise ValueError(f"tokens: {path} has {ids.dtype}, but tokenType is {kind}")
    return ids
