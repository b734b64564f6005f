"""A loss that takes the first sample of a microbatch for the whole of it is refused, and no other one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.from_module import from_module
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.task import Parts, Task, Weighted
from bamboo_trainer.tasks.inspection.loss_samples import MOST_VALUES, require_all_samples
from bamboo_trainer.tasks.task_errors import TaskError
from from_module_kit import model_of, small
from manifest_kit import bamboojob, training
from stage_kit import small_task

OUTPUTS = (torch.zeros(4, 3),)
ONE_IS_MASKED = (torch.tensor([1, -100, 2, 0]),)


def task(loss: Callable[[Any, Any], Any]) -> Task:
    return replace(small_task(), loss=loss)


def first_alone(outputs: Parts, targets: Parts) -> torch.Tensor:
    return F.cross_entropy(outputs[0][0], targets[0][0])


def first_alone_weighted(outputs: Parts, targets: Parts) -> Weighted:
    return Weighted(outputs[0][0].square().sum(), len(targets[0]))


def last_alone(outputs: Parts, targets: Parts) -> torch.Tensor:
    return F.cross_entropy(outputs[0][-1:], targets[0][-1:])


@pytest.mark.parametrize(
    ("loss", "one"), [(first_alone, "first"), (first_alone_weighted, "first"), (last_alone, "last")]
)
def test_one_sample_alone_is_refused(loss: Callable[[Any, Any], Any], one: str) -> None:
    with pytest.raises(TaskError, match=f"the loss depends on the {one} sample of a microbatch alone"):
        require_all_samples(task(loss), OUTPUTS, (torch.tensor([1, 0, 2, 0]),))


def masked(outputs: Parts, targets: Parts) -> torch.Tensor:
    return F.cross_entropy(outputs[0], targets[0])


def one_way(outputs: Parts, targets: Parts) -> torch.Tensor:
    """Gradients reach every second sample only."""
    return (outputs[0][0::2] - outputs[0][1::2].detach()).square().mean()


def hinge(outputs: Parts, targets: Parts) -> torch.Tensor:
    return (1 - outputs[0]).clamp(min=0, max=1).mean()


def of_triples(outputs: Parts, targets: Parts) -> torch.Tensor:
    first, second, third = outputs[0].unflatten(0, (-1, 3)).unbind(1)
    return (first - second - third).square().mean()


def constant(outputs: Parts, targets: Parts) -> torch.Tensor:
    return outputs[0].sum() * 0


@pytest.mark.parametrize("loss", [masked, one_way, hinge, of_triples, constant])
def test_other_losses_are_taken(loss: Callable[[Any, Any], Any]) -> None:
    require_all_samples(task(loss), OUTPUTS, ONE_IS_MASKED)


@pytest.mark.parametrize("outputs", [torch.zeros(1, 3), torch.zeros(8, 3), torch.empty(4, MOST_VALUES, device="meta")])
def test_what_cannot_be_tried_is_not_judged(outputs: torch.Tensor) -> None:
    """One sample; rows that are no samples; outputs that would take long."""
    require_all_samples(task(first_alone), (outputs,), ONE_IS_MASKED)


def test_it_is_looked_at_when_a_job_is_tried() -> None:
    document = bamboojob(task={"entrypoint": "own:build"}, training=training(2, 8, 4), topology={"stages": 2})
    spec = parse_manifest(document)
    model = model_of(lambda m, x: m.norm(m.blocks[2](m.blocks[1](m.blocks[0](x)))))
    measure(from_module(model, **small()), spec)
    with pytest.raises(TaskError, match="the first sample of a microbatch alone"):
        measure(from_module(model, **small() | {"loss": lambda outputs, targets: outputs[0][0].mean()}), spec)
