"""Rules for a task's layers and dataset: inputs stay unmodified, outputs can be sent."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import reference
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import example_of
from bamboo_trainer.tasks import user_code
from bamboo_trainer.tasks.inspection import layer_costs
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import dataset_length
from stage_kit import CONFIG, SPLITS, chain, one_step, small_task
from stage_task_kit import Counting


class Flags(nn.Module):
    """A layer that also returns a tensor of integers."""

    def forward(self, x):
        return x * 2, torch.arange(len(x))


class Renumbering(nn.Module):
    def forward(self, parts):
        return parts[0] + parts[1].add_(1)[:, None]


class Sometimes(nn.Module):
    """A layer that writes to its input only if the input has large values, so not in the first forward."""

    def forward(self, x):
        return x.mul_(0.5) if bool((x > 100).any()) else x * 0.5


@pytest.mark.parametrize("split", [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 4)], SPLITS[4]], ids=str)
@pytest.mark.parametrize("checkpointed", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("writer", ["first", "ReLU", "Renumbering"])
def test_a_layer_that_writes_to_its_inputs_is_refused_in_every_split(split, checkpointed, writer):
    linear, relu = partial(nn.Linear, 2, 2), partial(nn.ReLU, inplace=True)
    layers, name = {
        "first": ((relu, linear, nn.Tanh, linear), r"layer 0 \(ReLU\)"),
        "ReLU": ((linear, nn.Dropout, relu, linear), r"layer 2 \(ReLU\)"),
        "Renumbering": ((linear, Flags, Renumbering, linear), r"layer 2 \(Renumbering\)"),
    }[writer]
    task = small_task(layers=layers, checkpointed=checkpointed)
    with pytest.raises(TaskError, match=rf"^{name} writes to its inputs"):
        one_step(chain(task, split), 0)
    with pytest.raises(TaskError, match=rf"^{name} writes to its inputs"):
        layer_costs(task, 2)


@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)]], ids=str)
def test_a_layer_that_first_writes_later_is_refused_then(split):
    stages = chain(small_task(layers=(partial(nn.Linear, 2, 2), Sometimes)), split)
    one_step(stages, 0)
    with torch.no_grad():
        for parameter in stages[0].values.layers[0].parameters():
            parameter.fill_(1000.0)
    with pytest.raises(TaskError, match=r"^layer 1 \(Sometimes\) writes to its inputs"):
        one_step(stages, 1)


@pytest.mark.parametrize(
    ("convert", "told"),
    [
        (lambda x: x.to(torch.complex64), "torch.complex64, expected one of"),
        (lambda x: x.to(torch.uint32), "torch.uint32, expected one of"),
        (torch.Tensor.to_sparse, "layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)]], ids=str)
def test_what_cannot_be_sent_may_not_be_passed_on_in_any_split(convert, told, split):
    class Converting(nn.Linear):
        def forward(self, x):
            return convert(super().forward(x))

    stages = chain(small_task(layers=(partial(Converting, 2, 2), nn.Tanh)), split)
    with pytest.raises(TaskError, match=rf"^layer 0 \(Converting\) returned a tensor of {told}"):
        one_step(stages, 0)


def test_the_dataset_must_return_tuples_of_tensors():
    for wrong in (None, (torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), ((torch.zeros(2),), [1])):
        data = Counting((torch.zeros(12, 2),), (torch.zeros(12, 2),))
        data.batch = lambda indices, wrong=wrong: wrong
        with pytest.raises(TaskError, match=r"^the dataset returned .*, expected \(inputs, targets\)"):
            one_step(chain(small_task(dataset=data), [(0, 3)]), 0)


class Turned(nn.Module):
    """A layer whose output is not contiguous in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


def test_one_process_draws_the_masks_that_a_job_draws_whatever_the_layout_of_a_layers_output() -> None:
    """Dropout draws its mask in the order of memory, so plain PyTorch and a job need equal layouts of outputs."""
    task = small_task(layers=(partial(nn.Linear, 2, 3), Turned, partial(nn.Dropout, 0.5), partial(nn.Linear, 3, 2)))
    stages = chain(task, [(0, 4)])
    assert [one_step(stages, k) for k in range(3)] == pytest.approx(reference.train(task, CONFIG, 3)[0], rel=1e-6)


class Branches(nn.Module):
    """One of three layers: 0 returns its input x twice, 1 turns the first into 1e8 * x - 1e8 * x, 2 adds the two."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place

    def forward(self, x: torch.Tensor, kept: torch.Tensor | None = None):
        if kept is None:
            return x, x
        return (x * 1e8 + x * -1e8, kept) if self._place == 1 else x + kept


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_what_is_passed_on_twice_has_the_same_gradient_wherever_the_model_is_split(cut: int | None) -> None:
    """At any cut, the gradient of an output passed on twice is 1 + (1e8 - 1e8); (1 - 1e8) + 1e8 would be 0 in fp32."""
    x = torch.ones(1, requires_grad=True)
    parts, crossed = (x * 1,), []
    for place in range(3):
        if place == cut:
            leaves = tuple(part.detach().requires_grad_() for part in parts)
            crossed.append((parts, leaves))
            parts = leaves
        parts = user_code.run_layer(Branches(place), place, parts)
    parts[0].backward()
    for before, leaves in crossed:
        torch.autograd.backward(before, [leaf.grad for leaf in leaves])
    assert x.grad is not None
    assert x.grad.item() == 1


def test_what_a_layer_returns_has_one_layout_and_so_has_its_gradient() -> None:
    """Outputs and gradients are contiguous, as tensors from other workers are, so that no split changes the bits."""
    seen: list[torch.Tensor] = []

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = 2 * x
            y.register_hook(seen.append)
            return y.transpose(1, 2)

    (out,) = user_code.run_layer(Turned(), 0, (torch.ones(2, 3, 4, requires_grad=True),))
    assert out.is_contiguous()
    out.backward(torch.ones(2, 3, 4).transpose(1, 2))  # strides as the next layer may leave them
    (turned,) = seen
    assert turned.transpose(1, 2).is_contiguous()


class Numbered(torch.utils.data.Dataset[int]):
    """A map-style dataset of plain PyTorch, without `batch`."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Numbered(), "and Numbered has no batch; bamboo_trainer.data.Indexed makes one of it"),
        (iter(()), "and tuple_iterator has no batch"),
        (TensorDataset((torch.ones(0, 2),), (torch.ones(0, 2),)), "is empty"),
    ],
)
def test_what_gives_no_batches_is_no_dataset(dataset, said):
    """`dataset_length` and `example_of` refuse a dataset that gives no batches."""
    expected = f"^the dataset(: expected len\\(\\) and batch\\(indices\\),)? {re.escape(said)}$"
    with pytest.raises(TaskError, match=expected):
        dataset_length(replace(small_task(), dataset=dataset))
    with pytest.raises(TaskError, match=expected):
        example_of(dataset)
