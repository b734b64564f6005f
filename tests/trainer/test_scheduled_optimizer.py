"""A task's optimizer: learning rates of parameter groups, empty groups on a stage, writes to gradients, refusals."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import reference
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, chain, one_step, small_task, state_of

Named = Iterable[tuple[str, nn.Parameter]]
UNCLIPPED = replace(CONFIG, max_gradient_norm=None)


class Shift(nn.Module):
    """A layer that has only a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


LAYERS = (lambda: nn.Linear(2, 3), nn.Tanh, lambda: nn.Linear(3, 3, bias=False), Shift, lambda: nn.Linear(3, 2))
SPLITS = (
    [(0, 5)],
    [(0, 2), (2, 5)],
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],  # nothing to train, no biases, biases only
)


def by_name(kind: Callable[..., torch.optim.Optimizer], biases: dict[str, float], **settings: float):
    """Return a builder of an optimizer with separate settings for biases."""

    def build(named: Named) -> torch.optim.Optimizer:
        pairs = list(named)
        weights = [p for name, p in pairs if not name.endswith("bias")]
        rest = [p for name, p in pairs if name.endswith("bias")]
        return kind([{"params": rest, **biases}, {"params": weights}], **settings)

    return build


def grouped_task(optimizer: Callable[[Named], torch.optim.Optimizer]) -> Task:
    return small_task(layers=LAYERS, optimizer=optimizer, learning_rate=lambda step: 0.1 / (step + 1))


READING = ("Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta")
WAYS = ({"foreach": True}, {"fused": True}, {"maximize": True}, {"weight_decay": 0.1}, {"amsgrad": True})


def ways(name: str) -> Iterator[dict[str, Any]]:
    """Yield each combination of up to three WAYS that torch's optimizer `name` accepts, but no foreach with fused."""
    known = signature(getattr(torch.optim, name)).parameters.keys()
    for chosen in (some for count in range(4) for some in combinations(WAYS, count)):
        settings = {key: value for way in chosen for key, value in way.items()}
        if settings.keys() <= known and not {"foreach", "fused"} <= settings.keys():
            yield settings


@pytest.mark.parametrize(("name", "settings"), [(n, way) for n in (*READING, "SGD") for way in ways(n)])
def test_who_only_reads_gradients_leaves_them_as_they_are(name: str, settings: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    scheduled = ScheduledOptimizer(
        small_task(optimizer=lambda named: kind([p for _, p in named], lr=0.1, **settings)),
        [(f"0.{i}", parameter) for i, parameter in enumerate(parameters)],
    )
    gradient = torch.randn(6)
    for i, parameter in enumerate(parameters):
        parameter.grad = gradient[3 * i : 3 * i + 3]
    before, version = gradient.clone(), gradient._version
    for step in range(3):
        scheduled.step(step)
    assert scheduled.only_reads == (name in READING)
    assert not scheduled.only_reads or (torch.equal(gradient, before) and gradient._version == version)


def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Clip gradients, as a task's hook may do before or after a step."""
    for group in optimizer.param_groups:
        nn.utils.clip_grad_value_(group["params"], 0.01)


def with_own_step(optimizer: torch.optim.Optimizer) -> None:
    inner = optimizer.step

    def step() -> None:
        clip(optimizer)
        inner()

    optimizer.step = step  # type: ignore[method-assign, assignment]


HOOKED: tuple[Callable[[torch.optim.Optimizer], Any], ...] = (
    lambda optimizer: optimizer.register_step_pre_hook(clip),
    lambda optimizer: optimizer.register_step_post_hook(clip),
    with_own_step,
)


@pytest.mark.parametrize("hook", HOOKED)
def test_a_hook_that_clips_gradients_does_not_write_to_the_final_gradient(hook: Callable[..., Any]) -> None:
    """A task's hook clips a copy, and not the final gradient itself, which replicas and logs hold, too."""

    def build(named: Named) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([p for _, p in named], lr=0.1)
        hook(optimizer)
        return optimizer

    (stage,) = chain(small_task(optimizer=build), [(0, 3)], UNCLIPPED)
    gradient = torch.ones(stage.values.size)
    stage.values.apply(gradient, 1.0)
    assert torch.equal(gradient, torch.ones(stage.values.size))


def test_a_hook_for_all_optimizers_may_write_to_gradients() -> None:
    task = small_task(optimizer=lambda named: torch.optim.AdamW([p for _, p in named]))
    scheduled = ScheduledOptimizer(task, [("0.0", nn.Parameter(torch.ones(3)))])
    assert scheduled.only_reads
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not scheduled.only_reads
    finally:
        handle.remove()
    assert scheduled.only_reads


GROUPED = {
    "AdamW": by_name(torch.optim.AdamW, {"weight_decay": 0.0}, weight_decay=0.3),
    "AdamW with rates": by_name(torch.optim.AdamW, {"weight_decay": 0.0, "lr": 3e-4}, lr=1e-3, weight_decay=0.3),
    "foreach": by_name(torch.optim.AdamW, {"weight_decay": 0.0, "lr": 3e-4}, lr=1e-3, foreach=True),
    "fused AdamW": by_name(torch.optim.AdamW, {"weight_decay": 0.0, "lr": 3e-4}, lr=1e-3, fused=True),
    "fused Adam": by_name(torch.optim.Adam, {"lr": 3e-4}, lr=1e-3, fused=True, amsgrad=True),
    "fused momentum": by_name(torch.optim.SGD, {"lr": 7.0}, lr=2.0, momentum=0.9, fused=True),
    "fused Adagrad": by_name(torch.optim.Adagrad, {"lr": 0.0}, lr=0.1, fused=True),
    "momentum": by_name(torch.optim.SGD, {"momentum": 0.0, "lr": 7.0}, lr=2.0, momentum=0.9),
    "Adagrad": by_name(torch.optim.Adagrad, {"lr": 0.0}, lr=0.1),
    "NAdam": by_name(torch.optim.NAdam, {"lr": 0.2}, lr=0.1),
}


@pytest.mark.parametrize("split", SPLITS, ids=len)
@pytest.mark.parametrize("name", GROUPED)
def test_parameter_groups_train_as_in_plain_pytorch_on_any_split(name, split):
    task = grouped_task(GROUPED[name])
    losses, state = reference.train(task, UNCLIPPED, 4)
    stages = chain(task, split, UNCLIPPED)
    assert [one_step(stages, k, UNCLIPPED) for k in range(4)] == losses
    torch.testing.assert_close(state_of(stages), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("default", "own", "moved"),
    [
        (0.1, {}, 2.0),
        (0.1, {"lr": 0.1}, 2.0),
        (0.1, {"lr": 0.03}, 0.6),
        (0.5, {"lr": 5.0}, 20.0),
        (0.1, {"lr": 0.0}, 0.0),
        (0.0, {}, 2.0),
        (torch.tensor(0.5), {"lr": 0.25}, 1.0),
    ],
)
def test_a_group_keeps_its_multiple_of_the_learning_rate(default, own, moved):
    plain, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    task = small_task(
        optimizer=lambda named: torch.optim.SGD([{"params": [plain]}, {"params": [other], **own}], lr=default),
        learning_rate=lambda version: 2.0 * (version - 6),
    )
    optimizer = ScheduledOptimizer(task, [("plain", plain), ("other", other)])
    for steps, version in enumerate((7, 7), start=1):
        plain.grad, other.grad = torch.ones(2), torch.ones(2)
        optimizer.step(version)
        torch.testing.assert_close(plain.detach(), torch.full((2,), -2.0 * steps))
        torch.testing.assert_close(other.detach(), torch.full((2,), -moved * steps))


def pairs_in_groups(named: Named) -> torch.optim.Optimizer:
    pairs = list(named)
    biases = [pair for pair in pairs if pair[0].endswith("bias")]
    return torch.optim.SGD([{"params": biases}, {"params": [pair for pair in pairs if pair not in biases]}])


class Around(torch.optim.Optimizer):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = [torch.optim.AdamW(parameters)]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda named: torch.optim.LBFGS([p for _, p in named]),
            "returned LBFGS, whose step computes losses again by a closure; expected an optimizer that",
        ),
        (
            lambda named: Around([p for _, p in named]),
            r"returned Around, which keeps what it remembers in another optimizer \(AdamW\), where no replica would",
        ),
        (by_name(torch.optim.SGD, {"lr": 0.1}, lr=0.0), "rate of their own .0.1, 0.0., but the optimizer's default"),
        (by_name(torch.optim.SGD, {}, lr=-1.0), "task.optimizer raised ValueError: Invalid learning rate: -1.0"),
        (pairs_in_groups, "task.optimizer raised ValueError: all optimizer param groups should be with/without names"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_told(optimizer, message):
    with pytest.raises(TaskError, match=message):
        chain(grouped_task(optimizer), SPLITS[2])


def fused(config: Mapping[str, Any]) -> Task:
    return grouped_task(GROUPED["fused AdamW"])
