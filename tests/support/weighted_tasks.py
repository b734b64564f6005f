"""A task with metrics, with losses that its layers add, and with either a weighted or a mean loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.step_report import combined, step_report
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task, Weighted, add_loss
from bamboo_trainer.training import TrainingConfig
from stage_kit import begin, microbatch, reduce_tied

WIDTH, TOKENS, KINDS, SAMPLES = 6, 5, 4, 24
IGNORED = -100


class Enter(nn.Module):
    """A first layer that also passes on its integer input, and adds a loss without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, WIDTH)

    def forward(self, tokens: Tensor) -> Parts:
        add_loss(tokens.float().mean() / 8, "constant")
        return self.embed(tokens), tokens


class Experts(nn.Module):
    """A layer of two experts, with a loss that balances them and one that decays the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(WIDTH, 2), nn.Dropout(0.1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, given: Parts) -> Parts:
        hidden, tokens = given
        shares = self.gate(hidden).softmax(-1)
        add_loss(0.3 * shares.mean((0, 1)).square().sum(), "balance")
        add_loss(0.01 * self.gate.weight.square().sum(), "decay")
        mixed = sum(shares[..., i : i + 1] * torch.tanh(expert(hidden)) for i, expert in enumerate(self.experts))
        return self.drop(hidden + mixed), tokens


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, KINDS)

    def forward(self, given: Parts) -> Tensor:
        add_loss(0.1 * self.out.bias.square().sum() + given[0].square().mean(), "last")
        return self.out(given[0])


def loss_sum(outputs: Parts, targets: Parts) -> Tensor:
    logits = outputs[0].flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets[0].flatten(), ignore_index=IGNORED, reduction="sum")


def valid(targets: Parts) -> Tensor:
    return (targets[0] != IGNORED).sum()


def weighted(outputs: Parts, targets: Parts) -> Weighted:
    return Weighted(loss_sum(outputs, targets), valid(targets))


def mean(outputs: Parts, targets: Parts) -> Tensor:
    return loss_sum(outputs, targets) / (valid(targets) + 1)


def accuracy(outputs: Parts, targets: Parts) -> Weighted:
    right = (outputs[0].argmax(-1) == targets[0]).sum()
    return Weighted(right, valid(targets))


def largest(outputs: Parts, targets: Parts) -> float:
    return float(outputs[0].max())


def build(config: Mapping[str, Any]) -> Task:
    """Return the task. `config["weighted"]` (default true) selects a sum with its weight as loss, else a mean;
    "checkpointed" lists the layers whose activations are recomputed; "none" makes all targets invalid.
    """
    tokens = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS).square() // 3 % KINDS
    lengths = torch.arange(SAMPLES)[:, None] * 7 % (TOKENS + 1)  # some samples have no valid token
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(TOKENS) >= lengths, IGNORED)
    if config.get("none"):
        targets = torch.full_like(targets, IGNORED)
    return Task(
        layers=[Enter, Experts, Experts, Leave],
        loss=weighted if config.get("weighted", True) else mean,
        metrics={"accuracy": accuracy, "largest": largest},
        dataset=TensorDataset((tokens,), (targets,)),
        optimizer=lambda named: torch.optim.SGD(named, momentum=0.9),
        learning_rate=lambda step: 0.3,
        checkpointed=config.get("checkpointed", ()),
    )


def one_step(stages: Any, step: int, config: TrainingConfig) -> Any:
    works = [begin(stage, *range(config.microbatches)) for stage in stages]
    for index in range(config.microbatches):
        microbatch(stages, works, step, index)
    finals = reduce_tied(stages, [work.gradients.total() for work in works])
    for work in works:
        work.read(work.figures())
    reports = [
        step_report(Cell(0, s), stage.values.squared_norms(final).tolist(), work)
        for s, (stage, final, work) in enumerate(zip(stages, finals, works, strict=True))
    ]
    result = combined(reports)
    for stage, final in zip(stages, finals, strict=True):
        stage.values.apply(final, result.norm, scale=result.scale)
    return result


def added(layer: Callable[[], nn.Module]) -> dict[str, Any]:
    return {"layers": (lambda: nn.Linear(2, 2), layer)}
