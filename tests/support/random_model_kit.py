"""Small models drawn at random from layers as users write them; a model is a function of the number in its config.

A boundary carries the hidden values [samples, LENGTH, WIDTH] and what layers add to them: a mask, numbers, another
view, a table that is expanded, values in double precision. The head takes whatever has come along.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bamboo_trainer import schedules
from bamboo_trainer.lora import with_lora
from bamboo_trainer.task import Evaluation, Parts, Task, Weighted, add_loss, contribute, track_buffers

WORDS, WIDTH, LENGTH = 11, 8, 4
Factory = Callable[[], nn.Module]


class Samples:
    """Words, and those that follow them; each sample by its number."""

    def __init__(self, count: int, numbers: bool) -> None:
        self._count, self._numbers = count, numbers

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        rows = [torch.randint(0, WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(i)) for i in indices]
        words = torch.stack(rows)
        given = (F.one_hot(words[:, :-1], WORDS).float(),) if self._numbers else (words[:, :-1].contiguous(),)
        return given, (words[:, 1:].contiguous(),)


class Words(nn.Module):
    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.embedding, self._mask = nn.Embedding(WORDS, WIDTH), mask
        self.register_buffer("scale", torch.tensor(WIDTH**0.5))
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, words: Tensor) -> Tensor | Parts:
        hidden = self.embedding(words) * self.scale + self.offset
        return (hidden, words > 1) if self._mask else hidden


class Projection(nn.Module):
    """A layer for data that are floats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WORDS, WIDTH, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        return self.linear(given)


class Inner(nn.Module):
    """A layer that changes the hidden values only. strides: how its output lies in memory."""

    def __init__(self, module: nn.Module, *, residual: bool, strides: str, trained: bool) -> None:
        super().__init__()
        self.module, self._residual, self._strides = module, residual, strides
        self.requires_grad_(trained)

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor | Parts:
        out = self.module(hidden)
        out = hidden + out if self._residual else out
        if self._strides == "transposed":
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        elif self._strides == "slice":
            out = torch.cat([out, torch.zeros_like(out)], dim=-1)[..., :WIDTH]
        return (out, *others) if others else out


class Turned(nn.Module):
    """A module that wants the width in the middle."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.all, self.out, self._heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(1, 2) for one in self.all(hidden).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # a CPU may have no such kernel for 16 bits
            return self.rnn(hidden.to(self.rnn.weight_ih_l0.dtype))[0]


class Experts(nn.Module):
    """Each word goes to one of them; some may have none, in a microbatch or ever. A loss of their own balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = self.gate(hidden).softmax(-1)
        best, out = shares.max(-1), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = best.indices == number
            if chosen.any():
                out = out.masked_scatter(chosen[..., None], expert(hidden[chosen]).to(out.dtype))
        add_loss(0.01 * shares.flatten(0, 1).mean(0).square().sum(), "balance")
        return out * best.values[..., None]


class Centred(nn.Module):
    """A layer with a buffer of its own that its forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("centre", torch.zeros(WIDTH))
        track_buffers(self, ["centre"], _moved)

    def forward(self, hidden: Tensor) -> Tensor:
        contribute(self, hidden.detach().float().mean((0, 1)))
        return (hidden - self.centre) * self.weight


def _moved(buffers: Mapping[str, Tensor], mean: Tensor) -> Mapping[str, Tensor]:
    return {"centre": 0.9 * buffers["centre"] + 0.1 * mean}


class Adds(nn.Module):
    """Gives the layers after it one part more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        if kind == "table":
            self.table = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, hidden: Tensor, *others: Tensor) -> Parts:
        if self._kind == "halves":
            left, right = hidden.chunk(2, dim=-1)
            return torch.cat([right, left], -1), *others, left, right
        more = {
            "skip": lambda: hidden,
            "mask": lambda: hidden > 0,
            "numbers": lambda: (hidden.detach() * 3).to(torch.int64),
            "table": lambda: self.table.expand(hidden.shape),
            "double": lambda: hidden.double() / 2,
        }
        return hidden, *others, more[self._kind]()


class Head(nn.Module):
    """tied: its weight is to be that of the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if tied:
            self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        else:
            self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        for part in others:
            if part.dtype == torch.bool:
                hidden = hidden * (0.5 + (part if part.dim() == 3 else part[..., None]).float())
            elif part.shape == hidden.shape:
                hidden = hidden + 0.1 * part.to(hidden.dtype)
            else:  # a half
                hidden = hidden + F.pad(part, (0, WIDTH - part.shape[-1])).to(hidden.dtype)
        hidden = self.norm(hidden)
        return F.linear(hidden, self.weight) if hasattr(self, "weight") else self.linear(hidden)


def _wide() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH))


INNER: Mapping[str, Callable[[], nn.Module]] = {
    "wide": _wide,
    "linear": partial(nn.Linear, WIDTH, WIDTH),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "layer norm": partial(nn.LayerNorm, WIDTH),
    "rms norm": partial(nn.RMSNorm, WIDTH),
    "group norm": lambda: Turned(nn.GroupNorm(2, WIDTH)),
    "batch norm": lambda: Turned(nn.BatchNorm1d(WIDTH)),
    "batch norm, mean of all": lambda: Turned(nn.BatchNorm1d(WIDTH, momentum=None, affine=False)),
    "batch norm, frozen": lambda: Turned(nn.BatchNorm1d(WIDTH)).eval(),
    "instance norm": lambda: Turned(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "centred": Centred,
    "attention": partial(Attention, 2),
    "torch's attention": TorchAttention,
    "convolution": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "convolution, by groups": lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4, padding_mode="circular")),
    "gru": partial(Recurrent, nn.GRU),
    "lstm": partial(Recurrent, nn.LSTM),
    "experts": Experts,
    "dropout": partial(nn.Dropout, 0.3),
    "gelu": nn.GELU,
    "prelu": nn.PReLU,
    "identity": nn.Identity,
}
ADDS = ("skip", "mask", "numbers", "table", "double", "halves")

# Their epsilons are large, or a gradient of about nothing would be rounding errors as large as a step.
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": partial(torch.optim.SGD, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "fused adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
    "radam": partial(torch.optim.RAdam, lr=0.01, eps=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=0.01, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-2, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-2),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5, eps=1e-3),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
}


def _optimizer(
    make: Callable[[Any], torch.optim.Optimizer], grouped: bool, named: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    pairs = list(named)
    if not grouped:
        return make([p for _, p in pairs])
    rate = make([nn.Parameter(torch.zeros(1))]).defaults["lr"]
    groups = [
        {"params": [p for _, p in pairs if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in pairs if p.dim() <= 1], "lr": rate / 2},
    ]
    return make([group for group in groups if group["params"]])


def _mean(outputs: Parts, targets: Parts) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten())


def _weighted(outputs: Parts, targets: Parts) -> Weighted:
    """The loss without the words that are 0."""
    total = F.cross_entropy(outputs[0].flatten(0, 1), targets[0].flatten(), ignore_index=0, reduction="sum")
    return Weighted(total, (targets[0] != 0).sum())


def _right(outputs: Parts, targets: Parts) -> tuple[Tensor, int]:
    right = outputs[0].argmax(-1) == targets[0]
    return right.sum(), right.numel()


def _middle(rng: random.Random) -> list[Factory]:
    layers: list[Factory] = []
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.2:
            layers.append(partial(Adds, rng.choice(ADDS)))
            continue
        name, options = (
            rng.choice(list(INNER)),
            {
                "residual": rng.random() < 0.5,
                "strides": rng.choice(["as they are", "as they are", "transposed", "slice"]),
                "trained": rng.random() > 0.15,
            },
        )
        layers.append(partial(_inner, name, **options))
    if rng.random() < 0.25:  # one module twice
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.randrange(1000))
            shared = nn.Linear(WIDTH, WIDTH)
        for _ in range(2):
            layers.insert(rng.randint(0, len(layers)), partial(_of_shared, shared))
    return layers


def _inner(name: str, **options: Any) -> nn.Module:
    return Inner(INNER[name](), **options)


def _of_shared(shared: nn.Module) -> nn.Module:
    return Inner(shared, residual=True, strides="as they are", trained=True)


def build(config: Mapping[str, Any]) -> Task:
    """config: `model`, any number; and `steps` of the job."""
    rng = random.Random(int(config["model"]))
    numbers, tied = rng.random() < 0.3, rng.random() < 0.3
    layers: list[Factory] = [Projection if numbers else partial(Words, rng.random() < 0.3)]
    layers += _middle(rng)
    layers.append(partial(Head, tied and not numbers))
    ties = (("0.embedding.weight", f"{len(layers) - 1}.weight"),) if tied and not numbers else ()
    make = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
    rate = make([nn.Parameter(torch.zeros(1))]).defaults["lr"]
    task = Task(
        layers=tuple(layers),
        loss=rng.choice([_mean, _weighted]),
        dataset=Samples(rng.choice([20, 50]), numbers),
        optimizer=partial(_optimizer, make, rng.random() < 0.5),
        learning_rate=rng.choice([schedules.constant(rate), schedules.cosine(rate, steps=config["steps"], warmup=2)]),
        tied=ties,
        checkpointed=[i for i in range(len(layers)) if rng.random() < 0.2],
        evaluation=Evaluation(dataset=Samples(6, numbers), metrics={"right": _right}),
    )
    if rng.random() < 0.15 and not ties:
        return with_lora(
            task, rank=2, targets=("*linear", "*all", "*out", "*gate", "*experts*", "*module"), trained=("*norm*",)
        )
    return task
