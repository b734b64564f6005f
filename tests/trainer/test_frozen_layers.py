"""Frozen layers before the first trained layer have no backward, on any split, as in PyTorch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import reference
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection import layer_costs
from stage_kit import CONFIG, begin, chain, microbatch, one_step, state_of

WIDTH = 4


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("the backward of a layer in front of all that is trained")


class Layer(nn.Module):
    """A layer that also returns a mask of floats without a gradient. looked: a backward to its inputs raises."""

    def __init__(self, trained: bool, looked: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(trained)
        self.looked = looked

    def forward(self, x: Tensor, mask: Tensor) -> Parts:
        if self.looked:
            x = NoBackward.apply(x)
        return torch.tanh(self.inner(x)) * mask, mask


def task_of(trained: tuple[bool, ...], looked: bool) -> Task:
    points = torch.arange(24.0 * WIDTH).reshape(24, WIDTH) / 100
    first = trained.index(True)
    return Task(
        layers=[lambda n=n, one=one: Layer(one, looked and n <= first) for n, one in enumerate(trained)],
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((points, (points > 0.3).float()), (points.flip(1),)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1),
        learning_rate=lambda step: 0.1,
    )


def build(config: Mapping[str, Any]) -> Task:
    return task_of((False, False, True, False, True), looked=False)


def test_nothing_goes_back_in_front_of_what_is_trained() -> None:
    task = task_of((False, False, True, False, True), looked=True)
    stages = chain(task, [(0, 1), (1, 2), (2, 4), (4, 5)], replace(CONFIG, deterministic=False))
    crossed = microbatch(stages, [begin(stage) for stage in stages], 0, 0)
    needs = [[part.requires_grad for part in parts] for parts in crossed[:3]]
    assert needs == [[False, False], [False, False], [True, False]]
    last, third, second, first = crossed[4:]
    assert last[0].shape == (2, WIDTH)
    assert last[1] is None
    assert third == second == (None, None)
    assert first == ()


def test_numbers_are_those_of_plain_pytorch_on_any_split() -> None:
    task = task_of((False, False, True, False, True), looked=False)
    expected = reference.train(task, CONFIG, 3)[1]
    for split in ([(0, 5)], [(0, 1), (1, 2), (2, 4), (4, 5)]):
        stages = chain(task, split)
        for step in range(3):
            one_step(stages, step)
        torch.testing.assert_close(state_of(stages), expected, rtol=1e-5, atol=1e-6)


def test_a_backward_that_is_not_run_costs_nothing() -> None:
    _, frozen, trained, behind, _ = layer_costs(task_of((False, False, True, False, True), looked=True), 8)
    assert frozen < 0.6 * behind < behind < trained
