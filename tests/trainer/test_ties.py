"""Tied parameters: which names may be tied, and that they are one object on each stage."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer
from stage_kit import small_task


def task(*groups: tuple[str, ...]) -> Task:
    square = (lambda: nn.Linear(2, 2), nn.Tanh, lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 3))
    return replace(small_task(), layers=square, tied=groups)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((("0.weight",),), "tied group 0 names 1 parameters"),
        ((("0.weight", "0.weight"),), "tied group 0 names 1 parameters"),
        ((("0.weight", "4.weight"),), "'4.weight' is not"),
        ((("0.weight", "x.weight"),), "'x.weight' is not"),
        ((("0.weight", "2"),), "'2' is not"),
        ((("0.weight", "2.weight"), ("0.weight", "2.bias")), "'0.weight' appears twice"),
    ],
)
def test_names_that_cannot_be_tied_are_told(groups: tuple[tuple[str, ...], ...], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        tied_groups(task(*groups))


def test_a_name_has_its_group_and_the_groups_first_name() -> None:
    found = tied_groups(task(("2.weight", "0.weight"), ("0.bias", "2.bias")))
    assert found == {
        "2.weight": (0, "2.weight"),
        "0.weight": (0, "2.weight"),
        "0.bias": (1, "0.bias"),
        "2.bias": (1, "0.bias"),
    }


@pytest.mark.parametrize("here", [(0, 1, 2, 3), (0, 1), (2, 3)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_stage_has_the_first_names_value_wherever_that_layer_is(here: tuple[int, ...], apart: bool) -> None:
    made = task(("2.weight", "0.weight"))
    value = build_layer(made, 7, 2).get_parameter("weight")
    layers = {i: build_layer(made, 7, i) for i in here}
    shared = tie(layers, tied_groups(made), made, 7, apart=apart)
    found = [layers[i].get_parameter("weight") for i in (0, 2) if i in here]
    assert all(torch.equal(one, value) for one in found)
    assert {id(one) for one in found} == set(shared)
    assert len(shared) == (len(found) if apart else 1)


def test_parameters_of_different_shapes_are_not_tied_and_missing_ones_are_named() -> None:
    for groups, said in ((("0.weight", "3.weight"), "differ"), (("0.weight", "1.weight"), "layer 1 has no parameter")):
        made = task(groups)
        layers = {i: build_layer(made, 7, i) for i in range(4)}
        with pytest.raises(TaskError, match=said):
            tie(layers, tied_groups(made), made, 7)
