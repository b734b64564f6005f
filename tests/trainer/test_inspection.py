"""Inspection of a task: costs of its layers, random draws without a seed, and losses that use one sample alone."""

import cProfile
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.grid import split_layers
from bamboo_trainer.engine.determinism import forward_by_layer
from bamboo_trainer.from_module import from_module
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Parts, Task, Weighted
from bamboo_trainer.tasks.inspection import (
    MOST_VALUES,
    NoValues,
    layer_costs,
    require_all_samples,
    split_costs,
    values_wanted,
)
from bamboo_trainer.tasks.task_errors import TaskError
from determinism_kit import between
from from_module_kit import model_of, small
from layer_cost_kit import BATCH, WIDTH, Chooses, recurrent, sequences
from manifest_kit import bamboojob, minimal, training
from stage_kit import CONFIG, begin, small_task


def test_a_layer_is_built_without_drawing() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with NoValues():
        assert not values_wanted()
        layer = nn.Linear(4, 4)
        nn.init.xavier_normal_(tensor=layer.weight)
        assert layer.weight.normal_() is layer.weight
    assert torch.equal(torch.rand(3), expected)
    assert layer.weight.shape == (4, 4)


def test_values_are_wanted_unless_a_layer_is_only_looked_at() -> None:
    assert values_wanted()
    with FakeTensorMode():
        assert not values_wanted()
    assert values_wanted()


def test_the_plan_of_a_recurrent_model_is_balanced() -> None:
    """Recurrent layers have a cost, without which all six would be on one stage."""
    layers = [*[recurrent] * 6, *[lambda: nn.Linear(WIDTH, WIDTH)] * 8]
    stages = split_layers(layer_costs(sequences(*layers), BATCH), 3)
    assert [sum(1 <= layer <= 6 for layer in range(*stage)) for stage in stages] == [2, 2, 2]


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


def test_a_layer_that_ends_the_process_that_counts_is_run_for_real() -> None:
    here = os.getpid()

    def leaves() -> nn.Module:
        if os.getpid() != here:
            os._exit(3)
        return nn.Linear(WIDTH, WIDTH)

    plain, other = layer_costs(sequences(leaves, lambda: nn.Linear(WIDTH, WIDTH)), BATCH)[1:]
    assert plain == pytest.approx(other, rel=0.5)


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
    assert split_costs(sequences(Nowhere), parse_manifest(document)) == (1.0, 1.0)


class SeldomByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.random.uniform() < 1e-12 else x


def drawn(layer: type[nn.Module]) -> str:
    """Return the names of the generators that the layer draws from in both of two forwards; "" if there is none."""
    stage = build_stage(between(layer), 0, [(0, 3)], CONFIG)
    draws = stage.draws()
    for _ in range(2):
        forward_by_layer(stage, begin(stage), (0, 0), None, draws=draws)
    assert not draws[0].each_time()
    return draws[1].each_time()


def test_numpys_generator_may_be_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        assert (drawn(nn.Tanh), drawn(SeldomByNumpy)) == ("", "numpy.random")
    finally:
        np.random.set_bit_generator(before)


def test_a_profiler_that_runs_already_stays() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        drawn(nn.Tanh)
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()


def test_nothing_is_recorded_of_a_layer_that_raises() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    with pytest.raises(ValueError, match="RuntimeError"):
        drawn(Raises)
    assert sys.getprofile() is None
    assert torch.is_grad_enabled()


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
    """Return a loss with gradients for every second sample only."""
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
    """The trial skips a single sample, rows that are no samples, and outputs that are too large."""
    require_all_samples(task(first_alone), (outputs,), ONE_IS_MASKED)


def test_it_is_looked_at_when_a_job_is_tried() -> None:
    document = bamboojob(task={"entrypoint": "own:build"}, training=training(2, 8, 4), topology={"stages": 2})
    spec = parse_manifest(document)
    model = model_of(lambda m, x: m.norm(m.blocks[2](m.blocks[1](m.blocks[0](x)))))
    measure(from_module(model, **small()), spec)
    with pytest.raises(TaskError, match="the first sample of a microbatch alone"):
        measure(from_module(model, **small() | {"loss": lambda outputs, targets: outputs[0][0].mean()}), spec)
