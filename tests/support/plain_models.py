"""Plain torch modules in common styles, and tasks that `from_module` makes of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.task import Parts, Task

WIDTH, WORDS, LENGTH = 8, 11, 6


def chain() -> nn.Module:
    """Return a Sequential model, [samples, LENGTH] to [samples, WORDS], with two modules that write to their inputs."""
    return nn.Sequential(
        nn.Unflatten(1, (1, LENGTH)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4 * LENGTH, WIDTH),
        nn.Hardtanh(inplace=True),
        nn.Linear(WIDTH, WORDS),
    )


@dataclass
class State:
    hidden: Tensor
    table: Tensor | None = None


class DictBlock(nn.Module):
    """A block that takes a dataclass and, as keywords, a tensor and a dictionary with None; it returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, state: State, *, mask: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        assert options["nothing"] is None
        assert state.table is not None
        inner = self.dropout(torch.tanh(self.linear(self.norm(state.hidden))))
        hidden = state.hidden + options["scale"] * inner * mask[..., None] + state.table
        return {"hidden": hidden, "weights": None}


class Dictionaries(nn.Module):
    """A model whose blocks all get one mask, and the second half of them a trained table. Its head is tied to the
    embedding. After each block it adds half of the embedding's output times a norm of the block's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(DictBlock() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1, 4)]
        self.register_buffer("ramp", torch.linspace(0, 1, LENGTH), persistent=False)

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = self.embedding(words)
        first, weight = hidden * 0.5, mask.float()
        table = self.positions + self.ramp[:, None]
        zero = torch.zeros_like(table)
        for n, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            options = {"scale": self.rates[n], "nothing": None}
            state = State(hidden, table if n >= 2 else zero)
            hidden = block(state, mask=weight, options=options)["hidden"]
            hidden = hidden + first * norm(hidden)
        return {"logits": self.head(hidden * weight[..., None]), "cache": None}


class SizeBlock(nn.Module):
    """A block that takes sizes, and adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, samples: int, shape: torch.Size) -> tuple[Tensor, int]:
        inner = self.linear(torch.tanh(x.view(samples, *shape[1:], WIDTH))).relu_()
        x += inner
        return x, samples


class Sizes(nn.Module):
    """A model whose blocks take numbers that depend on the inputs' shapes; the last block is the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(SizeBlock() for _ in range(3))
        self.layers.append(self.layers[0])
        self.head = nn.LSTM(WIDTH, WORDS, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x, samples = self.embedding(words), words.shape[0]
        for layer in self.layers:
            x, samples = layer(x, samples, words.shape)
        out: Tensor = self.head(x.view(samples, -1, WIDTH))[0]
        return out


class Encoded(nn.Module):
    """A model of two lists of blocks; each block of the second list takes the first list's output."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
            mixed, weights = self.attention(x, memory, memory, need_weights=True)
            return x + mixed, weights

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.decoder = nn.ModuleList(self.Reader() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = memory = self.embedding(words)
        for layer in self.encoder:
            memory = layer(memory)
        seen = []
        for reader in self.decoder:
            x, weights = reader(x, memory)
            seen.append(weights)
        return self.head(x), seen


class Normed(nn.Module):
    """A model with BatchNorm before, in, after and between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))
        self.last, self.head = nn.BatchNorm1d(4), nn.Linear(4 * LENGTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x[:, None])
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + norm(block(x))
        out: Tensor = self.head(self.last(x).flatten(1))
        return out


def words() -> Tensor:
    return torch.randint(0, WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))


def padding() -> Tensor:
    """Return a mask [samples, length] that is true where a word counts."""
    return torch.arange(LENGTH) < torch.arange(64)[:, None] % (LENGTH - 2) + 3


def of_words(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())


def of_rows(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0])


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def parts(name: str) -> dict[str, Any]:
    """Return the arguments of `from_module` for the model of this name, without optimizer and learning rate."""
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "chain": lambda: {
            "make": chain,
            "dataset": TensorDataset((words().float(),), (words()[:, 0],)),
            "loss": of_rows,
        },
        "dictionaries": lambda: {
            "make": Dictionaries,
            "blocks": "blocks",
            "inputs": ("words", "mask"),
            "dataset": TensorDataset((words(), padding()), (words(),)),
            "loss": lambda outputs, targets: of_words((outputs["logits"],), targets),
        },
        "normed": lambda: {
            "make": Normed,
            "blocks": "blocks",
            "dataset": TensorDataset((words().float(),), (words()[:, 0],)),
            "loss": of_rows,
        },
        "sizes": lambda: {"make": Sizes, "dataset": TensorDataset((words(),), (words(),)), "loss": of_words},
        "encoded": lambda: {
            "make": Encoded,
            "blocks": ("encoder", "decoder"),
            "dataset": TensorDataset((words(),), (words(),)),
            "loss": lambda outputs, targets: of_words(outputs, targets) + outputs[1][0].square().mean(),
        },
    }
    return known[name]()


def build(config: Mapping[str, Any]) -> Task:
    given = parts(config["model"])
    return from_module(given.pop("make"), **given, optimizer=optimizer, learning_rate=1e-2)
