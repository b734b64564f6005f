"""A task whose layers sleep instead of computing, which looks like one accelerator per worker to the schedule.

On a machine with fewer cores than workers real arithmetic fills every bubble with another worker's work, so only the
total computing shows. Layers that sleep show the schedule: bubbles, waits and the critical path.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task

WIDTH = 64
SAMPLES = 512


@torch.library.custom_op("bamboo_bench::rest", mutates_args=())
def rest(x: Tensor, forward: float, backward: float) -> Tensor:
    """Return a copy after `forward` seconds; the gradient takes `backward`. Hooks could not rest in a compiled
    graph.
    """
    time.sleep(forward)
    return x.clone()


@rest.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _keep_seconds(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.seconds = inputs[2]


def _rested_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return rest(gradient, ctx.seconds, 0.0), None, None


rest.register_autograd(_rested_gradient, setup_context=_keep_seconds)


class Sleeper(nn.Module):
    """[samples, WIDTH] -> the same, through one small matrix and a rest.

    A backward spends half of its time on the gradient of the inputs and half on that of the matrix. slow: a file, and
    the factor by which everything takes longer in the process whose id it holds. ballast: elements of an unused
    parameter.
    """

    def __init__(
        self, forward_seconds: float, backward_seconds: float, ballast: int, slow: tuple[Path, float] | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if ballast:
            self.ballast = nn.Parameter(torch.zeros(ballast))
        self.seconds, self.slow = (forward_seconds, backward_seconds), slow

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._in_a_graph(x)
        forward, backward = (self._factor() * s for s in self.seconds)
        weight = self.linear.weight.view_as(self.linear.weight)
        result = torch.tanh(nn.functional.linear(x, weight, self.linear.bias))
        for one in (weight, result):
            if one.requires_grad:
                one.register_hook(partial(_sleep, backward / 2))  # type: ignore[no-untyped-call]
        time.sleep(forward)
        return result

    def _in_a_graph(self, x: Tensor) -> Tensor:
        forward, backward = self.seconds
        weight = rest(self.linear.weight, 0.0, backward / 2)
        found: Tensor = rest(torch.tanh(nn.functional.linear(x, weight, self.linear.bias)), forward, backward / 2)
        return found

    def _factor(self) -> float:
        mark, factor = self.slow or (None, 1.0)
        slow = mark is not None and mark.exists() and mark.read_text() == str(os.getpid())
        return factor if slow else 1.0


def _sleep(seconds: float, _: Tensor) -> None:
    time.sleep(seconds)


class WideSleeper(Sleeper):
    """[samples, any width] -> [samples, width]: columns beyond WIDTH are passed on, cut off or padded with zeros.
    weights: elements of a trained parameter, whose gradient travels.
    """

    def __init__(self, seconds: tuple[float, float], width: int, weights: int) -> None:
        super().__init__(*seconds, ballast=0)
        self.width = width
        if weights:
            self.weights = nn.Parameter(torch.zeros(weights))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x[:, :WIDTH])
        if hasattr(self, "weights"):
            y = y + self.weights.sum()
        if self.width == WIDTH:
            return y
        narrow = x.shape[1] == WIDTH
        return torch.cat((y, x.new_zeros(len(x), self.width - WIDTH) if narrow else x[:, WIDTH:]), 1)


def build_wide(config: Mapping[str, Any]) -> Task:
    """Build the task. config: layers; forwardMs and backwardMs of each; width: elements of a sample between two layers;
    weights: elements of a parameter in each.
    """
    count, seconds = int(config["layers"]), (config["forwardMs"] / 1e3, config["backwardMs"] / 1e3)
    widths = [int(config["width"])] * (count - 1) + [WIDTH]
    task = build({"layers": 0, "forwardMs": 0, "backwardMs": 0})
    return replace(task, layers=[partial(WideSleeper, seconds, width, int(config["weights"])) for width in widths])


def build(config: Mapping[str, Any]) -> Task:
    """Build the task. config: layers; forwardMs and backwardMs of each; slowed: [first, end, factor], layers that take
    longer; ballast: elements of an unused parameter in each; slow: mark and factor, see Sleeper.

    A slowed layer counts as many operations as the others, so the split does not compensate.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    first, end, factor = config.get("slowed", (0, 0, 1.0))
    factors = [factor if first <= index < end else 1.0 for index in range(int(config["layers"]))]
    seconds, ballast = [config[name] / 1e3 for name in ("forwardMs", "backwardMs")], int(config.get("ballast", 0))
    slow = (Path(config["slow"]["mark"]), float(config["slow"]["factor"])) if "slow" in config else None
    return Task(
        layers=[partial(Sleeper, f * seconds[0], f * seconds[1], ballast, slow) for f in factors],
        loss=_loss,
        dataset=TensorDataset((inputs,), (inputs.roll(1, 1).sin(),)),
        optimizer=_optimizer,
        learning_rate=lambda step: 1e-3,
    )


def _loss(outputs: Parts, targets: Parts) -> Tensor:
    return nn.functional.mse_loss(outputs[0], targets[0])


def _optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)
