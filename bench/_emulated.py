"""A task whose layers mostly sleep instead of computing, as if each worker had an accelerator of its own.

On a machine with fewer cores than workers, real arithmetic fills every bubble with another worker's work, so a step
shows only the total arithmetic. Layers that sleep show the schedule: bubbles, waits and the critical path.
"""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task

WIDTH = 64
SAMPLES = 512


class Sleeper(nn.Module):
    """A layer that applies a small linear map and tanh, and sleeps. Inputs and outputs are [samples, WIDTH].

    A backward sleeps half of its time for the gradient of the inputs and half for that of the weight. ballast: elements
    of an unused parameter; 0 for none.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float, ballast: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if ballast:
            self.ballast = nn.Parameter(torch.zeros(ballast))
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.view_as(self.linear.weight)
        result = torch.tanh(nn.functional.linear(x, weight, self.linear.bias))
        for one in (weight, result):
            if one.requires_grad:
                one.register_hook(partial(_sleep, self.backward_seconds / 2))  # type: ignore[no-untyped-call]
        time.sleep(self.forward_seconds)
        return result


def _sleep(seconds: float, _: Tensor) -> None:
    time.sleep(seconds)


def build(config: Mapping[str, Any]) -> Task:
    """Build the task. config: `layers`, their number; `forwardMs` and `backwardMs`, which each layer sleeps; `ballast`
    (optional), the elements of an unused parameter in each layer.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    forward, backward = config["forwardMs"] / 1e3, config["backwardMs"] / 1e3
    layer = partial(Sleeper, forward, backward, int(config.get("ballast", 0)))
    return Task(
        layers=[layer] * int(config["layers"]),
        loss=_loss,
        dataset=TensorDataset((inputs,), (inputs.roll(1, 1).sin(),)),
        optimizer=_optimizer,
        learning_rate=lambda step: 1e-3,
    )


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return nn.functional.mse_loss(outputs[0], targets[0])


def _optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)
