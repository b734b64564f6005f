"""Named schedules, equal to torch's schedulers, and scheduled settings of parameter groups, as in plain PyTorch."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import reference
from bamboo_trainer import schedules
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, chain, one_step, plain_model, plain_state, plain_steps, small_task, state_of

STEPS = 20
Named = Iterable[tuple[str, nn.Parameter]]


def torchs(make: Callable[[torch.optim.Optimizer], Any], rate: float = 0.5) -> list[float]:
    """Return the learning rates of one of torch's schedulers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def test_named_schedules_are_torchs() -> None:
    cases = {
        "cosine": (
            schedules.cosine(0.5, steps=STEPS, final=0.1),
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=0.1),
        ),
        "polynomial": (
            schedules.polynomial(0.5, steps=STEPS, power=3.0),
            lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS, power=3.0),
        ),
        "linear": (schedules.linear(0.5, steps=STEPS), lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS)),
        "milestones": (
            schedules.milestones(0.5, at=[12, 5]),
            lambda o: lr_scheduler.MultiStepLR(o, milestones=[5, 12]),
        ),
        "one_cycle": (
            schedules.one_cycle(0.5, steps=STEPS + 1),
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=STEPS + 1, cycle_momentum=False),
        ),
        "constant": (schedules.constant(0.5), lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0)),
    }
    for name, (ours, theirs) in cases.items():
        assert [ours(k) for k in range(STEPS)] == pytest.approx(torchs(theirs), rel=1e-9, abs=1e-12), name


def test_warm_up_reaches_the_peak_and_decays_end_where_they_should() -> None:
    for make in (schedules.linear, schedules.cosine, schedules.polynomial):
        at = make(1.0, steps=10, warmup=4, final=0.25)
        assert [at(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0], make
        assert at(10) == at(99) == 0.25, make
        assert all(at(k) > at(k + 1) for k in range(4, 10)), make
        assert [make(1.0, steps=2, warmup=2)(k) for k in range(2)] == [0.5, 1.0]
    root = schedules.inverse_sqrt(1.0, warmup=4)
    assert [root(k) for k in (0, 3, 4, 15)] == [0.25, 1.0, math.sqrt(4 / 5), 0.5]
    assert schedules.constant(2.0, warmup=2)(0) == 1.0
    momentum = schedules.cycled(0.95, 0.85, steps=20)
    assert (momentum(0), momentum(5), momentum(19)) == pytest.approx((0.95, 0.85, 0.95))
    assert schedules.one_cycle(1.0, steps=1)(0) > 0  # not a division by zero


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.cosine(1.0, steps=0), "steps must be at least 1, got 0"),
        (lambda: schedules.linear(1.0, steps=5, warmup=6), r"warmup must be at most steps \(5\), got 6"),
        (lambda: schedules.constant(1.0, warmup=-1), "warmup must be at least 0, got -1"),
        (lambda: schedules.inverse_sqrt(1.0, warmup=0), "warmup must be at least 1"),
        (lambda: schedules.milestones(1.0, at=[-3]), "milestones must be steps from 0 up, got -3"),
        (lambda: schedules.cycled(1.0, 0.5, steps=5, rise=1.0), "rise must be between 0 and 1"),
        (lambda: schedules.one_cycle(1.0, steps=5, final_factor=0), "start_factor and final_factor must be above 0"),
        (lambda: schedules.polynomial(1.0, steps=5, power=0.0), "power must be positive"),
    ],
)
def test_a_schedule_that_cannot_be_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def sgd(named: Named) -> torch.optim.Optimizer:
    """Return SGD whose biases have half the weights' momentum."""
    pairs = list(named)
    groups = [
        {"params": [p for name, p in pairs if name.endswith("weight")]},
        {"params": [p for name, p in pairs if name.endswith("bias")], "momentum": 0.4},
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.8)


SGD = {"momentum": lambda step: 0.0 if step < 2 else 0.1 * step, "weight_decay": lambda step: 0.01 * step}
ADAM = {"betas": lambda step: (0.9 - 0.1 * step, 0.99), "weight_decay": lambda step: 0.2 / (step + 1)}


def scheduled(kind: str) -> Task:
    if kind == "SGD":
        return small_task(optimizer=sgd, learning_rate=schedules.cosine(0.1, steps=6), schedules=SGD)
    return small_task(optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01), schedules=ADAM)


def plainly(kind: str, steps: int) -> dict[str, torch.Tensor]:
    task = scheduled(kind)
    model = plain_model(task)
    optimizer = task.optimizer(list(model.named_parameters()))
    for step, _ in plain_steps(task, model, optimizer, CONFIG, steps):
        for g in optimizer.param_groups:
            half = 0.5 if kind == "SGD" and g is optimizer.param_groups[-1] else 1.0
            if kind == "SGD":
                g["momentum"], g["weight_decay"] = half * SGD["momentum"](step), 0.01 * step
            else:
                g["betas"], g["weight_decay"] = ADAM["betas"](step), ADAM["weight_decay"](step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.max_gradient_norm or 0.0)
    return plain_state(model)


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 2), (2, 3)]], ids=len)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_scheduled_numbers_train_as_in_plain_pytorch(kind: str, split: list[tuple[int, int]]) -> None:
    stages = chain(scheduled(kind), split)
    for step in range(6):
        one_step(stages, step)
    torch.testing.assert_close(state_of(stages), plainly(kind, 6), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(state_of(stages), reference.train(scheduled(kind), CONFIG, 6)[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedules": {"lr": lambda step: 1.0}}, 'names "lr", whose schedule is task.learning_rate'),
        ({"schedules": [3]}, "task.schedules must be a mapping"),
        ({"schedules": {"betas": lambda step: (0.9, 0.99)}}, "names 'betas', which SGD does not have; it has dampen"),
        ({"schedules": {"momentum": lambda step: math.nan}}, r"\(0\) returned nan, expected a finite number"),
        ({"schedules": {"momentum": lambda step: 1 // 0}}, r"task.schedules\['momentum'\]\(0\) raised"),
        (
            {"optimizer": lambda named: torch.optim.AdamW(named), "schedules": {"betas": lambda step: 0.9}},
            r"task.schedules\['betas'\]\(0\) returned 0.9, expected 2 finite numbers",
        ),
    ],
)
def test_a_wrong_schedule_is_told_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        one_step([build_stage(small_task(**changes), 0, [(0, 3)], CONFIG)], 0)


def build(config: dict[str, Any]) -> Task:
    return scheduled(config["kind"])
