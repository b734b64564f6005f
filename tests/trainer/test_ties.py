"""Tied parameters: valid names, one object on each stage, and layers that share parameters without `Task.tied`."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import joined_groups, settled, tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig
from sharing_tasks import SHARING, WIDTH, WORDS, Head, Whole, build
from stage_kit import one_step, plain_model, plain_state, plain_steps, small_task, state_of


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


STEPS = 5
CONFIG = TrainingConfig(seed=0, precision="fp32", max_gradient_norm=None, microbatches=4, micro_batch_size=3)


def plainly(task: Task) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch with one model, whose layers share one parameter object. Return its state."""
    model = plain_model(task, CONFIG.seed)
    assert list(plain_steps(task, model, task.optimizer(list(model.named_parameters())), CONFIG, STEPS))
    return plain_state(model)


@pytest.mark.parametrize("sharing", [*SHARING, "frozen"])
@pytest.mark.parametrize("split", [[(0, 5)], [(0, 3), (3, 5)], [(s, s + 1) for s in range(5)]], ids=len)
def test_stages_train_what_plain_pytorch_trains(sharing: str, split: list[tuple[int, int]]) -> None:
    expected = plainly(build({"sharing": sharing}))
    task = settled(build({"sharing": sharing}), CONFIG.seed)
    made = {s: build_stage(task, s, split, CONFIG) for s in reversed(range(len(split)))}  # the last one first
    stages = [made[s] for s in range(len(split))]
    for step in range(STEPS):
        one_step(stages, step, CONFIG)
    torch.testing.assert_close(state_of(stages), expected, rtol=1e-5, atol=1e-6)


def test_what_is_shared_is_tied_under_the_first_layers_name() -> None:
    task = settled(build({"sharing": "made_before"}), 0)
    assert task.tied == (("1.weight", "3.inner.weight"), ("1.bias", "3.inner.bias"), ("0.weight", "4.1.weight"))


def test_a_layer_is_made_anew_at_each_call() -> None:
    task = settled(build({"sharing": "made_before"}), 0)
    one, other = build_layer(task, 0, 1), build_layer(task, 0, 1)
    assert one is not other
    assert torch.equal(one.weight, other.weight)
    with torch.no_grad():
        one.weight.zero_()
    assert torch.equal(build_layer(task, 0, 1).weight, other.weight)


def test_a_task_that_shares_nothing_stays_as_it_is() -> None:
    """A task whose layers share only buffers and frozen parameters, which do not change, gets no tied parameters."""
    here, made = os.getpid(), []

    def layer() -> nn.Module:
        if os.getpid() == here:
            made.append(1)
        module = nn.Linear(2, 2)
        module.register_buffer("table", table)
        module.register_parameter("frozen", frozen)
        return module

    table, frozen = torch.ones(3), nn.Parameter(torch.ones(2), requires_grad=False)
    task = small_task(layers=(layer, layer))
    assert settled(task, 0) is task
    assert not made


def test_what_is_shared_joins_what_the_task_ties() -> None:
    """Shared parameters join the groups of `Task.tied`, which may use another name of the parameter."""
    inner = nn.Linear(WIDTH, WIDTH)
    layers = [lambda: Whole(inner), lambda: Whole(inner), lambda: nn.Linear(WIDTH, WIDTH)]
    task = settled(small_task(layers=layers, tied=(("2.weight", "1.alias.weight"),)), 0)
    assert task.tied == (("2.weight", "1.inner.weight", "0.inner.weight"), ("0.inner.bias", "1.inner.bias"))
    assert joined_groups([("a", "b"), ("c", "d"), ("e", "f")], [("b", "d")]) == (("a", "b", "c", "d"), ("e", "f"))


def aliases() -> tuple[Callable[[], nn.Module], ...]:
    embedding = nn.Embedding(WORDS, WIDTH)

    def other() -> nn.Module:
        layer = nn.Linear(WIDTH, WORDS)
        layer.weight = nn.Parameter(embedding.weight.data)
        return layer

    return lambda: embedding, other


def parts(*columns: slice) -> tuple[Callable[[], nn.Module], ...]:
    """Return factories of layers whose weights are columns of one matrix."""
    whole = torch.zeros(4, 8)

    def layer(chosen: slice) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(whole[:, chosen])
        return module

    return tuple(lambda c=c: layer(c) for c in columns)


def copied_buffer() -> tuple[Callable[[], nn.Module], ...]:
    linear = nn.Linear(2, 2)
    watcher = nn.Module()
    watcher.register_buffer("weights", linear.weight.detach())
    return lambda: linear, lambda: watcher


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (aliases(), "0.weight and 1.weight lie in the same memory"),
        (parts(slice(0, 5), slice(4, 8)), "0.weight and 1.weight lie"),
        (copied_buffer(), "0.weight and 1.weights lie"),
    ],
)
def test_what_cannot_be_tied_is_refused_with_both_names(layers: Any, names: str) -> None:
    with pytest.raises(TaskError, match=names):
        settled(small_task(layers=layers), 0)


def test_parameters_may_lie_side_by_side_in_the_same_memory() -> None:
    settled(small_task(layers=parts(slice(0, 4), slice(4, 8))), 0)


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_a_parameter_that_a_layer_uses_and_does_not_have_is_refused(where: str) -> None:
    embedding = nn.Embedding(WORDS, WIDTH)
    task = replace(build({"sharing": "cached"}), layers=(lambda: embedding, lambda: nn.Linear(WIDTH, WIDTH)))
    if where == "loss":
        task = replace(task, loss=lambda outputs, targets: (outputs[0] @ embedding.weight.T).mean())
    else:

        class Borrows(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ borrowed[0].T

        borrowed = [embedding.weight]
        task = replace(task, layers=(*task.layers, Borrows))
    split = [(0, len(task.layers))]
    with pytest.raises(TaskError, match=r"use a parameter \[10, 6\] that none of these layers has"):
        one_step([build_stage(settled(task, 0), 0, split, CONFIG)], 0, CONFIG)


class Sometimes(nn.Module):
    """A layer that uses a weight of another layer from its second call on."""

    def __init__(self, borrow: Callable[[], nn.Parameter]) -> None:
        super().__init__()
        self.inner, self.borrow, self.calls = nn.Linear(WIDTH, WORDS), borrow, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.borrow().T if self.calls > 1 else self.inner(x)


@pytest.mark.parametrize("split", [[(0, 3)], [(0, 2), (2, 3)]], ids=len)
def test_a_finished_module_that_is_first_used_late_by_another_layer_is_refused_by_name(split: Any) -> None:
    """A layer that uses another layer's weight only from a later call on is refused: each stage trains its own copy."""
    embedding = nn.Embedding(WORDS, WIDTH)
    layers = (lambda: embedding, lambda: nn.Linear(WIDTH, WIDTH), lambda: Sometimes(lambda: embedding.weight))
    task = settled(replace(build({"sharing": "cached"}), layers=layers), 0)
    stages = [build_stage(task, s, split, CONFIG) for s in range(len(split))]
    with pytest.raises(TaskError, match=r"uses parameter 'weight' of layer 0 \(Embedding\) without having it"):
        one_step(stages, 0, CONFIG)
    assert stages[-1].has_run, "the first forward was right"


def test_a_layer_that_cannot_be_copied_is_told() -> None:
    head = Head(nn.Embedding(WORDS, WIDTH))
    head.lock = open(os.devnull)  # noqa: SIM115
    task = settled(small_task(layers=(lambda: head, lambda: head)), 0)
    with pytest.raises(TaskError, match="does not make a new layer at each call, and it cannot be copied"):
        build_layer(task, 0, 1)
    head.lock.close()
