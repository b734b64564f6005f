"""`bamboo validate --load`: checks of a task, its size and its memory before a job runs."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import reference
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.check import check
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.task import Task
from stage_kit import small_task
from task_check_kit import manifest


def of(task: Task, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> dict[str, Any]:
    """Return the result of `check` for a job with this task."""
    monkeypatch.setattr(reference, "build_it", lambda config: task, raising=False)
    training = {"steps": 3, "globalBatchSize": 8, "microBatchSize": 2}
    default = {"task": {"entrypoint": "reference:build_it"}, "training": training}
    return check(manifest(**{**default, "topology": {"stages": 2}, **spec}))


class Looks(nn.Module):
    """A layer whose control flow depends on values, so it cannot run without data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (
            {"task": {"entrypoint": "no_such_module:build"}},
            "cannot import 'no_such_module': there is no such module in",
        ),
        (
            {"topology": {"stages": 4}, "worker": {"devices": 3}},
            "spec.topology.stages: expected with spec.worker.devices (3) at most the model's 8 layers, got 12",
        ),
        ({"topology": {"stages": 99}}, "spec.topology.stages: expected at most the model's 8 layers, got 99"),
    ],
)
def test_what_would_fail_at_the_start_is_told_before(spec: dict[str, Any], problem: str) -> None:
    assert problem in check(manifest(**spec))["problem"]


def test_layers_and_parameters_are_counted_and_tied_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (lambda: nn.Linear(2, 2), nn.ReLU, lambda: nn.Linear(2, 2))
    found = of(small_task(layers=layers, tied=(("0.weight", "2.weight"),)), monkeypatch)
    assert (found["layers"], found["parameters"]) == (3, 8)
    assert [stage[2] for stage in found["stages"]] == [6, 6]
    assert [stage[0] for stage in found["stages"]] == [0, found["stages"][0][1] + 1]


@functools.cache
def table() -> torch.Tensor:
    return torch.arange(2.0)


class Remembers(nn.Linear):
    """A layer that caches a table on its first call; a cache made in a run without data would be useless."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + table()


def test_a_run_without_data_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    table.cache_clear()
    task = small_task(layers=(Remembers, Looks, lambda: nn.Linear(2, 2)))
    found = of(task, monkeypatch, topology={"stages": 2, "split": [1, 2]})
    assert "problem" not in found, found
    assert type(table()) is torch.Tensor


def test_memory_is_that_of_the_states_and_of_the_microbatches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked memory equals a sum by hand: two stages of one layer each, with AdamW."""
    width, batch = 64, 16
    points = torch.arange(256.0).reshape(128, 2) / 256  # for a whole step
    layers = (lambda: nn.Linear(2, width), lambda: nn.Sequential(nn.Tanh(), nn.Linear(width, 2)))
    data = TensorDataset((points,), (points,))
    task = small_task(layers=layers, dataset=data, optimizer=lambda named: torch.optim.AdamW([p for _, p in named]))
    training = {"steps": 3, "globalBatchSize": 8 * batch, "microBatchSize": batch}
    alone = {"training": training, "topology": {"stages": 2, "split": [1, 1]}, "redundancy": {"mode": "None"}}
    spec = parse_manifest(manifest(**alone))
    sizes = measure(task, spec)
    (first, second), inputs = (size.bytes for size in sizes), sizes[1].inputs
    assert (first.parameters, first.gradients) == (4 * 3 * width, 4 * 3 * width)
    assert first.optimizer == pytest.approx(2 * first.parameters, abs=16)  # and a step number for each parameter
    assert first.boundary == inputs == 4 * width * batch
    assert second.activations >= 4 * width * batch  # what tanh gave
    found = of(task, monkeypatch, **alone)["calm"]
    memory = found["memory"]
    assert (found["stage"], memory["replica"], memory["parameters"]) == (1, 0, second.parameters)
    sent = 2 * 8 * inputs  # the gradients that it sent, of two steps
    summed = 3 * second.gradients  # after 7 groups, the sums of 4, 2 and 1 groups wait in the binary tree
    assert memory["log"] == sent + summed + 3 * first.gradients
    together = {**alone, "topology": {"stages": 1}, "worker": {"devices": 2}}
    assert of(task, monkeypatch, **together)["calm"] == {
        "stage": 0,
        "memory": {**memory, "log": sent + summed},
    }, "of the second device"
    replicas = of(task, monkeypatch, **{**alone, "redundancy": {"mode": "Replicas"}})
    assert replicas["calm"]["memory"]["replica"] > 0
    assert sum(replicas["taken_over"]["memory"].values()) > sum(replicas["calm"]["memory"].values())
