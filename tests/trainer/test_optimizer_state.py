"""Optimizers that change their parameter groups, and refusal of steps that depend on more than gradient and state."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_core.coordinator.events import Outcome
from bamboo_trainer.checkpoint.layer_file import decode
from bamboo_trainer.frames import CommonState
from bamboo_trainer.optimizers import Combined
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.tasks.task_errors import NotDeterministic, TaskError
from split_state_kit import LAYERS, SPLITS, Averaging, Listing, OfWhole, files_of
from stage_kit import CONFIG, ROUNDED, at, begin, chain, microbatch, one_step, small_task, whole_state
from training_job import Job, job_of


def counting(kind):
    return small_task(layers=LAYERS, optimizer=lambda named: kind([p for _, p in named], lr=0.1))


def test_a_stage_that_is_ahead_goes_back_with_the_numbers_of_its_groups():
    """A stage goes back to any earlier state, also to the first one, which lacks some of the groups' numbers."""
    task = counting(Averaging)
    stage = build_stage(task, 0, SPLITS[0], CONFIG)
    kept = [whole_state(stage)]
    for step in range(3):
        one_step([stage], step)
        kept.append(whole_state(stage))
    digests = []
    for version in (1, 0, 3):
        other = build_stage(task, 0, SPLITS[0], CONFIG)
        other.values.restore(kept[version])
        stage.values.restore(kept[version])
        for step in range(version, 5):
            one_step([stage], step)
            one_step([other], step)
        digests += [stage.values.digest(), other.values.digest()]
    assert len(set(digests)) == 1


def test_numbers_that_depend_on_the_split_are_refused_on_another_one_only():
    task = counting(OfWhole)
    stages = chain(task, SPLITS[1])
    one_step(stages, 0)
    states = {layer: decode(data) for layer, data in files_of(stages).items()}
    for index, same in enumerate(chain(task, SPLITS[1])):
        same.values.restore(states)
        assert same.values.digest() == stages[index].values.digest()
    whole = build_stage(task, 0, SPLITS[0], CONFIG)
    digest = whole.values.digest()
    with pytest.raises(ValueError, match=r"'size' of the optimizer's parameter group differs between .*how the layers"):
        whole.values.restore(states)
    assert (whole.values.digest(), whole.values.version) == (digest, 0)


def test_an_optimizer_whose_groups_change_in_what_is_no_number_is_refused_by_name():
    stage = build_stage(counting(Listing), 0, SPLITS[0], CONFIG)
    with pytest.raises(TaskError, match="the optimizer changes 'rates' of its parameter groups, which is list"):
        one_step([stage], 0)


class OverAll(torch.optim.SGD):
    """An optimizer that divides each gradient by one plus the norm of all its parameters' gradients."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient /= norm + 1
        super().step()


class Warming(torch.optim.SGD):
    """An optimizer whose learning rate depends on a step count in an attribute, outside of its state."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1 + 1 / self.steps)
        super().step()


class Remembering(torch.optim.SGD):
    """An optimizer that keeps a momentum for each parameter outside of its state."""

    def step(self, closure=None):
        self.kept = getattr(self, "kept", {})
        for group in self.param_groups:
            for p in group["params"]:
                self.kept[p] = p.grad + 0.5 * self.kept.get(p, 0)
                p.grad.copy_(self.kept[p])
        super().step()


def job(optimizer: Any, grid: tuple[int, int]) -> Job:
    layers = [lambda: nn.Linear(2, 2), lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))] * 2
    return job_of(small_task(layers=layers, costs=[1] * 4, optimizer=optimizer), grid, 13)


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [OverAll, Warming, Remembering])
def test_an_optimizer_that_is_no_function_of_gradient_and_state_is_found(kind, grid) -> None:
    message = rf"the optimizer \({kind.__name__}\) came to other bits of parameter \d\.\S+ in step (1|6|12) than one"
    with pytest.raises(NotDeterministic, match=message):
        job(lambda named: kind([p for _, p in named], lr=0.1), grid).run()


def mixed(named):
    """Return an optimizer with one rule for matrices and another one for other parameters."""
    pairs = list(named)
    matrices, others = [p for _, p in pairs if p.dim() == 2], [p for _, p in pairs if p.dim() < 2]
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    return Combined([(momentum, matrices), (partial(torch.optim.AdamW, lr=0.1), others)], lr=0.1)


SOUND = {
    "SGD": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, dampening=0.1),
    "Nesterov": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, amsgrad=True),
    "fused": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, fused=True),
    "Adagrad": lambda named: torch.optim.Adagrad([p for _, p in named], lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda named: torch.optim.NAdam([p for _, p in named], lr=0.1),
    "RAdam": lambda named: torch.optim.RAdam([p for _, p in named], lr=0.1),
    "Rprop": lambda named: torch.optim.Rprop([p for _, p in named], lr=0.1),
    "ASGD": lambda named: torch.optim.ASGD([p for _, p in named], lr=0.1),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.1),
    "groups": lambda named: torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 if "weight" in n else 0.2, "weight_decay": 0.1} for n, p in named], lr=0.1
    ),
    "Combined": mixed,
}


FAST = ("Nesterov", "fused", "groups", "Combined")  # torch's ways to update, and what may differ by parameter


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("grid", [pytest.param((1, 1), marks=pytest.mark.slow), (2, 2)])
@pytest.mark.parametrize("name", each(SOUND))
def test_sound_optimizers_are_not_found(name, grid) -> None:
    done = job(SOUND[name], grid).run()
    assert done.outcome is Outcome.COMPLETE, done.emitted


@pytest.mark.parametrize("config", [CONFIG, at("bf16"), at("fp16"), ROUNDED])
@pytest.mark.parametrize("name", each(SOUND))
def test_a_trial_leaves_the_step_as_it_is(name, config) -> None:
    """A trial of the optimizer, in every precision and on every layer, changes no bit of later steps."""
    digests = []
    for tries in (False, True):
        stage = build_stage(small_task(optimizer=SOUND[name]), 0, [(0, 3)], config)
        applied = 0
        while applied < 4:
            work, step = begin(stage), stage.values.version
            for m in range(config.microbatches):
                microbatch([stage], [work], step, m)
            gradient = work.gradients.total()
            if torch.isfinite(gradient).all():
                stage.values.apply(gradient, 0.1, tries=tries)
                applied += 1
            else:
                scale = stage.values.common.loss_scale
                assert scale is not None, "in fp16, until the scale fits"
                stage.values.skip()
                stage.values.begin_step(CommonState(loss_scale=scale.after(finite=False)))
        digests.append(stage.values.digest())
    assert digests[0] == digests[1]
