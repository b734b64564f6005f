"""Tasks whose layers share modules or parameters as Python objects, as usual in PyTorch, without `Task.tied`."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Task

WIDTH, WORDS = 6, 10


class Head(nn.Module):
    """A last layer that uses the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.bias = embedding.weight, nn.Parameter(torch.zeros(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Whole(nn.Module):
    """A layer that contains another layer, under two names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.alias = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


Layers = list[Callable[[], nn.Module]]


def made_before() -> Layers:
    """Return the layers of a model that is built first and then cut; one block is used twice."""
    torch.manual_seed(5)
    embedding, block = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
    last = nn.Sequential(nn.LayerNorm(WIDTH), Head(embedding))
    return [lambda: embedding, lambda: block, nn.Tanh, lambda: Whole(block), lambda: last]


def cached() -> Layers:
    """Return layers that share cached modules; the first layer that needs a module makes it."""

    @functools.cache
    def embedding() -> nn.Embedding:
        return nn.Embedding(WORDS, WIDTH)

    @functools.cache
    def block() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    return [embedding, lambda: Whole(block()), block, nn.Tanh, lambda: Head(embedding())]


def left_behind() -> Layers:
    """Return layers of which the first leaves its embedding in a variable for the last one."""
    box: dict[str, nn.Embedding] = {}

    def first() -> nn.Module:
        box["embedding"] = nn.Embedding(WORDS, WIDTH)
        return box["embedding"]

    return [first, lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh, nn.Identity, lambda: Head(box["embedding"])]


def made_here_only() -> Layers:
    """Return layers of which one can be built only in this process; another process gets a RuntimeError."""
    torch.manual_seed(5)
    embedding, here = nn.Embedding(WORDS, WIDTH), os.getpid()

    def particular() -> nn.Module:
        if os.getpid() != here:
            raise RuntimeError("another process")
        return nn.Linear(WIDTH, WIDTH)

    return [lambda: embedding, particular, nn.Tanh, nn.Identity, lambda: Head(embedding)]


def frozen() -> Layers:
    """Return layers of which two share a block that is not trained."""
    torch.manual_seed(5)
    block = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    last = nn.Linear(WIDTH, WORDS)
    return [lambda: nn.Embedding(WORDS, WIDTH), lambda: Whole(block), nn.Tanh, lambda: Whole(block), lambda: last]


SHARING: dict[str, Callable[[], Layers]] = {f.__name__: f for f in (made_before, cached, left_behind, made_here_only)}


def build(config: Mapping[str, Any]) -> Task:
    """Return a task whose layers share modules. config: `sharing`, a key of SHARING or "frozen"."""
    words = torch.arange(24) * 7 % WORDS
    return Task(
        layers=(SHARING | {"frozen": frozen})[config["sharing"]](),
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs[0], targets[0]),
        dataset=TensorDataset((words,), ((words * 3 + 1) % WORDS,)),
        optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.1),
        learning_rate=lambda step: 0.03,
    )
