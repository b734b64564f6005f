"""Refused losses, weights and metrics of a task."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_trainer.task import Parts, Weighted, add_loss
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG as SMALL
from stage_kit import chain, small_task
from weighted_tasks import added, one_step


def measured(total: Any, weight: Any) -> Callable[[Parts, Parts], Any]:
    return lambda outputs, targets: Weighted(total(outputs), weight)


def adding(value: Any, name: str = "a") -> Callable[[], nn.Module]:
    class Adds(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            add_loss(value(given), name)
            return given

    return Adds


CALLS = iter(range(100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": measured(lambda o: o[0].sum(), -1)},
            "the loss: the weight must be a finite number of at least 0, got -1",
        ),
        ({"loss": measured(lambda o: o[0].sum(), float("nan"))}, "the loss: the weight must be a finite .*, got nan"),
        ({"loss": measured(lambda o: o[0].sum(), "3")}, "the loss: the weight must be a finite .*, got '3'"),
        ({"loss": measured(lambda o: o[0].sum(), torch.ones(2))}, r"the weight must be a number, got a tensor \[2\]"),
        ({"loss": measured(lambda o: o[0], 1)}, "scalar tensor as its total"),
        ({"loss": measured(lambda o: torch.ones(()), 1)}, "the loss does not depend on any parameter"),
        (
            {"loss": lambda o, t: o[0].mean() if next(CALLS) % 2 else Weighted(o[0].sum(), 2)},
            "Weighted for some microbatches and a mean for others",
        ),
        ({"metrics": {"m": lambda o, t: o[0]}}, r"the metric 'm' returned a tensor \[2, 2\], expected one number"),
        ({"metrics": {"m": lambda o, t: 1 / 0}}, "metric 'm' raised ZeroDivisionError"),
        ({"metrics": {"m": lambda o, t: Weighted(1.0, -2)}}, "the metric 'm': the weight must be"),
        (added(adding(lambda x: x)), "add_loss: the value must be a scalar tensor of floats"),
        (added(adding(lambda x: 3.0)), "add_loss: the value must be a scalar tensor of floats"),
        (added(adding(lambda x: x.sum(), "a b")), "add_loss: the name must be up to 64 letters, .*, got 'a b'"),
    ],
)
def test_what_is_wrong_is_told_by_name(changes: dict[str, Any], message: str) -> None:
    task = small_task(**changes)
    with pytest.raises(TaskError, match=message):
        one_step(chain(task, [(0, len(task.layers))]), 0, SMALL)


def test_an_added_loss_needs_no_job() -> None:
    """Outside of a job, add_loss does nothing."""
    layer = adding(lambda x: x.sum())()
    assert torch.equal(layer(torch.ones(2)), torch.ones(2))
