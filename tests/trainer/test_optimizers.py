"""Steps of `Combined`, equal to those of each of its optimizers alone."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from bamboo_trainer.optimizers import Combined
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from stage_kit import small_task

Named = Iterable[tuple[str, nn.Parameter]]


def muon_and_adagrad(named: Named) -> Combined:
    parameters = [p for _, p in named]
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    muon, adagrad = partial(torch.optim.Muon, lr=0.02), partial(torch.optim.Adagrad, lr=0.01)
    return Combined([(muon, matrices), (adagrad, others)], lr=0.02)


def build(config: Mapping[str, Any]) -> Task:
    """Return a task of three layers: with vectors only, with a matrix only, and with a matrix and a vector."""
    layers = (lambda: nn.LayerNorm(2), lambda: nn.Linear(2, 2, bias=False), lambda: nn.Linear(2, 2))
    return small_task(layers=layers, optimizer=muon_and_adagrad, learning_rate=lambda step: 0.02 / (1 + step))


def test_its_steps_are_those_of_its_parts() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(model.state_dict())
    combined = ScheduledOptimizer(
        small_task(optimizer=muon_and_adagrad, learning_rate=lambda step: 0.01), list(model.named_parameters())
    )
    apart = (torch.optim.Muon([other.weight], lr=0.01), torch.optim.Adagrad([other.bias], lr=0.005))
    for step in range(3):
        for one in (model, other):
            one.zero_grad()
            one(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        combined.step(step)
        for part in apart:
            part.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
