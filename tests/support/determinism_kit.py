"""Tasks that are repeatable, and others."""

from typing import Any

import torch
from torch import nn

from bamboo_trainer.task import Task
from manifest_kit import bamboojob, training
from stage_kit import small_task
from training_job import Job


def between(layer) -> object:
    """A task with that layer in the middle."""
    return small_task(layers=(lambda: nn.Linear(2, 3), layer, lambda: nn.Linear(3, 2)))


def job_of(task: Task, grid: tuple[int, int], steps: int, mode: str = "Replicas", **numbers: Any) -> Job:
    """A job that trains this task. numbers: what else the manifest's training has."""
    document = bamboojob(
        task={"entrypoint": "given:build"},
        training=training(steps, 8, 2, maxGradientNorm=1.0, **numbers),
        topology={"stages": grid[0], "pipelines": grid[1], "schedule": "1F1B"},
        redundancy={"mode": mode},
    )
    return Job(document, task=task)


class Late(nn.Module):
    """Does something to its buffers in one forward of many."""

    def __init__(self, act, at: int) -> None:
        super().__init__()
        self.act, self.at, self.calls = act, at, 0
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("cache", None)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            with torch.no_grad():
                self.act(self)
        return x * self.weight
