"""What a stage's optimizer remembers, averages of parameters among it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.user_code import build_layer
from export_kit import averages
from stage_kit import CONFIG, accumulate, chain, one_step, small_task, state_bytes

AVERAGED = replace(CONFIG, ema=0.9)


OPTIMIZERS = {
    "AdamW": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.05),  # its state comes with a step
}


def task_with(optimizer: str) -> Task:
    return small_task(optimizer=OPTIMIZERS[optimizer], learning_rate=lambda step: 0.05)


def plainly(task: Task, steps: int) -> dict[str, Tensor]:
    """With torch's own averaging."""
    model = nn.Sequential(*(build_layer(task, AVERAGED.seed, index) for index in range(3)))
    optimizer = task.optimizer(list(model.named_parameters()))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first call copies
    for step in range(steps):
        optimizer.zero_grad()
        accumulate(task, model, AVERAGED, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), AVERAGED.max_gradient_norm or 0.0)
        optimizer.step()
        averaged.update_parameters(model)
    return {name: tensor.detach() for name, tensor in averaged.module.named_parameters()}


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 1), (1, 3)]], ids=len)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages_are_torchs(optimizer: str, split: list[tuple[int, int]]) -> None:
    stages = chain(task_with(optimizer), split, AVERAGED)
    without = chain(task_with(optimizer), split, CONFIG)
    for step in range(4):
        assert one_step(stages, step, AVERAGED) == one_step(without, step, CONFIG), "training does not depend on it"
    torch.testing.assert_close(averages(stages), plainly(task_with(optimizer), 4), rtol=1e-5, atol=1e-7)
    held, remembered = state_bytes(stages[0])
    assert remembered - state_bytes(without[0])[1] == sum(p.nbytes for p in stages[0].values.parameters.trained()), (
        "it is accounted for"
    )
    assert held == state_bytes(without[0])[0]
