"""Parameters' places in flat tensors, marks of used parameters, and fp32 sums of bf16 parameters' gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_trainer.stage.parameters import FlatParameters, Slot
from bamboo_trainer.stage.stage import build_stage
from precision_kit import build
from stage_kit import ROUNDED, begin, microbatch


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("begins", [0, 3])
def test_a_slot_is_its_piece_of_the_flat_tensor(shape: tuple[int, ...], begins: int) -> None:
    slot = Slot("0.weight", nn.Parameter(torch.zeros(shape)), 16, None)
    flat = torch.arange(64.0)[begins:]
    view = slot.of(flat)
    assert view.shape == shape
    assert torch.equal(view.reshape(-1), flat[slot.offset : slot.mark])
    view.fill_(-1.0)
    assert int((flat == -1.0).sum()) == slot.parameter.numel(), "it is a view"


def test_marks_are_those_of_the_parameters_that_backwards_have_reached() -> None:
    layer = nn.Linear(3, 2)
    parameters = FlatParameters({0: layer}, {}, torch.device("cpu"))
    gradient, marked = torch.zeros(parameters.gradient_size), set[int]()
    parameters.bind(gradient)
    layer.bias.sum().backward()
    parameters.mark(gradient, marked)
    assert parameters.used(gradient) == [False, True]
    layer(torch.ones(1, 3)).sum().backward()
    parameters.mark(gradient, marked)
    assert parameters.used(gradient) == [True, True]
    assert [float(gradient[slot.mark]) for slot in parameters.slots] == [1.0, 1.0], "each is marked once"


UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


def test_gradients_are_summed_in_fp32_and_updates_are_rounded() -> None:
    stage = build_stage(build({}), 0, [(0, 4)], UNCLIPPED)
    work = begin(stage, 0, 1, 2)
    for index in range(3):
        microbatch([stage], [work], 0, index)
    total = work.gradients.total()
    assert total.dtype == torch.float32
    each = []
    for index in range(3):
        one = stage.begin([index], [index, index + 1])
        microbatch([stage], [one], 0, index)
        each.append(one.gradients.total().clone())
    marks = [slot.mark for slot in stage.values.parameters.slots]
    for sums in (total, *each):
        sums[marks] = 0
    assert torch.equal(total, each[0] + each[1] + each[2])
    assert not torch.equal(total, total.bfloat16().float()), "the sum has more digits than bf16"
    assert all(torch.equal(one, one.bfloat16().float()) for one in each), "a microbatch's gradient is that of bf16"
