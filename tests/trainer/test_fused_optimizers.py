"""torch's fused kernels of Adam and AdamW, which Bamboo uses if a task chooses no kernel."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_trainer.checkpoint.layer_file import decode
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.optimizers import Combined
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.scheduled_optimizer import fuse
from split_state_kit import LAYERS, SPLITS, files_of
from stage_kit import CONFIG, chain, one_step, plain_model, plain_steps, small_task, state_of, whole_state

Named = Iterable[tuple[str, nn.Parameter]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
KERNELS: dict[str, Make] = {
    "AdamW": partial(ADAMW, lr=0.1, weight_decay=0.3),
    "Adam": partial(ADAM, lr=0.1, weight_decay=0.3),
    "amsgrad": partial(ADAMW, lr=0.1, amsgrad=True),
}


# the same bits as a plain loop


@pytest.mark.parametrize(("stated", "equal"), [(True, True), (None, False)])
def test_a_convolution_before_a_norm_gets_the_bits_of_a_plain_loop_with_the_same_kernel(
    stated: bool | None, equal: bool
) -> None:
    """A plain loop has a job's bits only with the job's kernel: Adam magnifies rounding in gradients of nearly zero."""
    images = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    layers = (lambda: nn.Conv2d(2, 3, 3), lambda: nn.BatchNorm2d(3), nn.ReLU, nn.Flatten, lambda: nn.Linear(48, 2))
    task = small_task(
        layers=layers,
        dataset=TensorDataset((images,), (images[:, :, 0, 0],)),
        optimizer=lambda named: ADAMW([p for _, p in named], lr=0.1),
    )
    config = replace(CONFIG, max_gradient_norm=None)
    stages = chain(task, [(0, len(layers))], config)
    model = plain_model(task)
    for step, _ in plain_steps(task, model, ADAMW(model.parameters(), lr=0.1, fused=stated), config, 5):
        one_step(stages, step, config)
    found = state_of(stages)
    same = [torch.equal(found[f"layers.{name}"], parameter) for name, parameter in model.named_parameters()]
    assert all(same) is equal


# where a task leaves it open


class Own(torch.optim.AdamW):
    """A subclass of AdamW, whose step may do anything."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (ADAMW, [True]),
        (ADAM, [True]),
        (partial(ADAMW, fused=False), [False]),
        (partial(ADAMW, foreach=False), [None]),
        (partial(ADAMW, foreach=True), [None]),
        (partial(ADAMW, capturable=True), [None]),
        (partial(ADAMW, differentiable=True), [None]),
        (Own, [None]),
        (SGD, [None]),
        (torch.optim.Adagrad, [None]),
        (torch.optim.NAdam, [None]),
        (lambda p: ADAMW([{"params": p[:1]}, {"params": p[1:], "foreach": True}]), [True, None]),
        (lambda p: Combined([(SGD, p[:1]), (ADAMW, p[1:])], lr=1e-3), [None, True]),
    ],
)
def test_what_a_task_says_stays(make: Make, expected: list[bool | None]) -> None:
    optimizer = make([nn.Parameter(torch.ones(3)) for _ in range(2)])
    fuse(optimizer)
    assert [group.get("fused") for group in optimizer.param_groups] == expected


def test_a_parameter_with_gaps_is_none_for_a_kernel_that_walks_over_memory() -> None:
    optimizer = ADAMW([nn.Parameter(torch.ones(8)[::2])])
    fuse(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


class Gaps(nn.LayerNorm):
    """A norm whose weight has gaps in memory and, as it stays in fp32, is outside of the flat parameters."""

    def __init__(self) -> None:
        super().__init__(3)
        self.weight = nn.Parameter(torch.ones(6)[::2])


def test_a_stage_has_no_parameters_with_gaps() -> None:
    rounded = replace(CONFIG, precision="bf16", parameter_precision="bf16")
    layers = (lambda: nn.Linear(2, 3), Gaps, lambda: nn.Linear(3, 2))
    (stage,) = chain(small_task(layers=layers, optimizer=_open), [(0, 3)], rounded)
    assert all(slot.parameter.is_contiguous() for slot in stage.values.parameters.slots)
    assert {kernel for _, kernel in _kernels(stage)} == {True}


def _open(named: Named) -> torch.optim.Optimizer:
    return ADAMW([p for _, p in named], lr=0.1)


def _unfused(named: Named) -> torch.optim.Optimizer:
    """Return the optimizer of `_open` without a fused kernel."""
    return ADAMW([p for _, p in named], lr=0.1, fused=False)


def _of(optimizer: Callable[[Named], torch.optim.Optimizer]) -> Task:
    return small_task(layers=LAYERS, optimizer=optimizer)


def _kernels(stage: Stage) -> list[tuple[str, bool]]:
    """Return names and values of `fused` flags in the stage's state; empty if torch or the task chooses the kernel."""
    numbers = [one for state in whole_state(stage).values() for one in state.scalars.items()]
    return [(name, value) for name, value in numbers if name.endswith(":param_group.fused")]


# what was kept without them goes on without them


def _trained(stages: list[Stage], steps: range) -> dict[str, Tensor]:
    for step in steps:
        one_step(stages, step)
    return state_of(stages)


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_a_state_that_was_kept_before_goes_on_with_the_bits_of_its_kernels(split: list[tuple[int, int]]) -> None:
    old = chain(_of(_unfused), SPLITS[1])
    _trained(old, range(2))
    states = {layer: decode(data) for layer, data in files_of(old).items()}
    new = chain(_of(_open), split)
    assert any(_kernels(stage) for stage in new)
    for stage in new:
        stage.values.restore(states)
    assert not any(_kernels(stage) for stage in new)
    replicas = chain(_of(_open), split)
    for replica, stage in zip(replicas, new, strict=True):
        replica.values.restore(whole_state(stage))
    expected = _trained(old, range(2, 5))
    for stages in (new, replicas):
        torch.testing.assert_close(_trained(stages, range(2, 5)), expected, rtol=0, atol=0)
    fused = _trained(chain(_of(_open), split), range(5))
    assert any(not torch.equal(fused[name], expected[name]) for name in expected), "the kernels differ in some bit"


@pytest.mark.parametrize("says", [{"foreach": True}, {"fused": False}, {"fused": True}])
def test_a_task_that_now_names_a_kernel_has_it_whatever_was_kept(says: dict[str, bool]) -> None:
    (kept,) = chain(_of(_open), SPLITS[0])
    one_step([kept], 0)
    made: list[torch.optim.Optimizer] = []

    def named(parameters: Named) -> torch.optim.Optimizer:
        made.append(ADAMW([p for _, p in parameters], lr=0.1, **says))
        return made[-1]

    stage = build_stage(_of(named), 0, SPLITS[0], CONFIG)
    stage.values.restore(whole_state(kept))
    (group,) = made[-1].param_groups
    assert (group["foreach"], group["fused"]) == (says.get("foreach"), says.get("fused"))
    assert not _kernels(stage)


# jobs


def build_open(config: Mapping[str, Any]) -> Task:
    return _of(_open)
