"""Parameters that a step does not use, and so does not train: idle experts, skipped layers, ignored outputs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.scheduled_optimizer import fuse
from bamboo_trainer.training import TrainingConfig
from stage_kit import (
    chain,
    one_step,
    plain_model,
    plain_state,
    plain_steps,
    small_task,
    state_bytes,
    state_of,
    whole_state,
)

WIDTH = 4
KINDS = (0, 0, 1, 0, 2, 0, 0, 3, 0, 1, 0, 0)  # of the samples; most experts have nothing to do in most microbatches
Named = Iterable[tuple[str, nn.Parameter]]
OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW(named, weight_decay=0.3),
    "foreach": lambda named: torch.optim.AdamW(named, weight_decay=0.3, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, weight_decay=0.3, fused=True),
    "momentum": lambda named: torch.optim.SGD(named, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda named: torch.optim.Adagrad(named, weight_decay=0.1),
    "NAdam": lambda named: torch.optim.NAdam(named, weight_decay=0.1),  # remembers nothing before the first use
}


class Enter(nn.Module):
    """A layer that also returns an estimate, which the next layer may ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.estimate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, given: Parts) -> Parts:
        x, kinds = given
        h = torch.tanh(self.main(x)) * self.frozen
        if (kinds == 1).any():
            h = h + x @ self.tied
        return h, self.estimate(x), kinds


class Estimated(nn.Module):
    """A layer that uses the estimate if a sample is of kind 2, and passes no gradient back if one is of kind 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, given: Parts) -> Parts:
        h, estimate, kinds = given
        if (kinds == 2).any():
            h = h + self.weigh(estimate)
        return (h.detach() if (kinds == 3).any() else h), kinds


class Experts(nn.Module):
    """A layer with an expert for each kind of sample."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given: Parts) -> Parts:
        h, kinds = given
        out = h
        for kind, expert in enumerate(self.experts):
            if (chosen := (kinds == kind).nonzero()[:, 0]).numel():
                out = out.index_add(0, chosen, torch.tanh(expert(h[chosen])).to(h.dtype))
        return out, kinds


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, 1)
        self.tied = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, given: Parts) -> Tensor:
        h, kinds = given
        return self.main(h @ self.tied if (kinds == 2).any() else h)


def build(config: Mapping[str, Any]) -> Task:
    """Return a task with parameters that some steps do not use. config: optimizer, a key of OPTIMIZERS."""
    x = torch.linspace(-1, 1, len(KINDS) * WIDTH).reshape(len(KINDS), WIDTH).sin()
    return Task(
        layers=[Enter, Estimated, Experts, nn.Identity, Experts, Leave],
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((x, torch.tensor(KINDS)), (x.sum(1, keepdim=True),)),
        optimizer=OPTIMIZERS[config.get("optimizer", "AdamW")],
        learning_rate=lambda step: 0.05,
        tied=(("0.tied", "5.tied"),),
        checkpointed=(2,),
    )


STEPS = 7
CONFIG = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=4, micro_batch_size=1)
SPLITS = ([(0, 6)], [(0, 1), (1, 6)], [(0, 3), (3, 6)], [(s, s + 1) for s in range(6)])


def plainly(optimizer: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Train in plain PyTorch. Return the final parameters by name, and the number of steps that used each."""
    task = build({"optimizer": optimizer})
    model = plain_model(task, CONFIG.seed)
    model[5].tied = model[0].tied
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trainer, used = task.optimizer(named.items()), dict.fromkeys(named, 0)
    fuse(trainer)
    for _ in plain_steps(task, model, trainer, CONFIG, STEPS):
        for name, parameter in named.items():
            used[name] += parameter.grad is not None
    return plain_state(model), used


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_train_what_plain_pytorch_trains(optimizer: str) -> None:
    expected, used = plainly(optimizer)
    assert {0, STEPS} < set(used.values())
    assert used["0.never"] == 0
    assert used["0.tied"] < used["5.main.weight"] == STEPS
    task = build({"optimizer": optimizer})
    torch.testing.assert_close(reference.train(task, CONFIG, STEPS)[1], expected, rtol=0, atol=0)
    for split in SPLITS:
        stages = chain(task, split, CONFIG)
        for step in range(STEPS):
            one_step(stages, step, CONFIG)
        torch.testing.assert_close(state_of(stages), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_in_which_some_parameters_were_never_used_is_handed_over(optimizer: str) -> None:
    """A stage that is ahead, and one parked in host memory, restore each step's state and train on to equal bits."""
    task = build({"optimizer": optimizer})
    one, other, later = (build_stage(task, 0, SPLITS[0], CONFIG) for _ in range(3))
    other.values.park(True)
    for step in range(STEPS):
        one_step([later], step, CONFIG)
    for step in range(STEPS):
        one_step([one], step, CONFIG)
        for holder in (other, later):
            holder.values.restore(whole_state(one))
            assert holder.values.digest() == one.values.digest()
            assert state_bytes(holder) == state_bytes(one)
        if step + 1 < STEPS:
            for holder in (other, later):
                one_step([holder], step + 1, CONFIG)
            assert other.values.digest() == later.values.digest() != one.values.digest()


class Silent(torch.autograd.Function):
    """A function without a gradient for one of its inputs, like a compiled layer that detaches an input."""

    @staticmethod
    def forward(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


class Ignoring(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return Silent.apply(x, y)


def test_a_layer_that_says_of_no_gradient_is_as_one_of_another_stage() -> None:
    task = small_task(layers=(lambda: nn.Linear(2, 2), Twice, Ignoring))
    whole, parts = chain(task, [(0, 3)]), chain(task, [(0, 2), (2, 3)])
    assert [one_step(whole, k) for k in range(2)] == [one_step(parts, k) for k in range(2)]
    torch.testing.assert_close(state_of(whole), state_of(parts), rtol=0, atol=0)
