"""What layers cost: counted without computing them, and for real only where that cannot be."""

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.grid import split_layers
from bamboo_trainer.tasks.inspection.costs import layer_costs, profile
from bamboo_trainer.tasks.task_errors import TaskError
from layer_cost_kit import BATCH, WIDTH, Chooses, recurrent, sequences
from manifest_kit import minimal


def test_the_plan_of_a_recurrent_model_is_balanced() -> None:
    """Recurrent layers that counted as free would all come to stand on one stage."""
    layers = [*[recurrent] * 6, *[lambda: nn.Linear(WIDTH, WIDTH)] * 8]
    stages = split_layers(layer_costs(sequences(*layers), BATCH), 3)
    assert [sum(1 <= layer <= 6 for layer in range(*stage)) for stage in stages] == [2, 2, 2]


def test_a_layer_is_run_for_real_only_where_it_must_be(caplog: pytest.LogCaptureFixture) -> None:
    """And those before it, since it needs what they give; the log says which and why."""
    here, built = os.getpid(), []

    def noted(index: int) -> nn.Module:
        if os.getpid() == here:
            built.append(index)
        return Chooses() if index == 1 else nn.Linear(WIDTH, WIDTH)

    layer_costs(sequences(*(functools.partial(noted, index) for index in range(4))), BATCH)
    assert built == [0, 1]
    (warning,) = caplog.messages
    assert "layer 2 was counted by running it for real" in warning
    assert "DataDependentOutput" in warning


def test_one_that_gives_the_next_layer_a_part_of_a_parameter_may_be_in_front_of_it() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(20, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rows[: x.shape[1]]

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, self.table(x).expand(x.shape)

    class Both(Chooses):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return super().forward(x + table)

    costs = layer_costs(sequences(Adds, Both), BATCH)
    assert all(cost > 1 for cost in costs)


def test_a_layer_that_ends_the_process_that_counts_is_run_for_real(caplog: pytest.LogCaptureFixture) -> None:
    here = os.getpid()

    def leaves() -> nn.Module:
        if os.getpid() != here:
            os._exit(3)
        return nn.Linear(WIDTH, WIDTH)

    plain, other = layer_costs(sequences(leaves, lambda: nn.Linear(WIDTH, WIDTH)), BATCH)[1:]
    assert plain == pytest.approx(other, rel=0.5)
    assert "ended without a result" in caplog.text


def test_a_layer_may_read_its_values_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"weight": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH)}, tmp_path / "linear.safetensors")

    def loaded() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.load_state_dict(load_file(tmp_path / "linear.safetensors"))
        return layer

    _, plain, read = layer_costs(sequences(lambda: nn.Linear(WIDTH, WIDTH), loaded), BATCH)
    assert plain == read
    assert caplog.messages == []


class Nowhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a kernel that is not there")


def test_a_task_states_its_costs_and_nothing_is_run() -> None:
    task = replace(sequences(Nowhere), costs=(1, 2.5))
    assert layer_costs(task, BATCH) == (1.0, 2.5)
    with pytest.raises(TaskError, match=r"layer 1 \(Nowhere\) raised RuntimeError: needs a kernel"):
        layer_costs(replace(task, costs=None), BATCH)


def test_where_the_manifest_says_the_split_nothing_is_run() -> None:
    document = minimal()
    document["spec"]["topology"] = {"stages": 2, "split": [1, 1]}
    assert profile(sequences(Nowhere), parse_manifest(document)) == (1.0, 1.0)
