"""Where a parameter's gradient lives in the stage's flat one, whatever its shape and wherever that begins."""

import pytest
import torch
from torch import nn

from bamboo_trainer.stage.state.parameters import FlatParameters, Slot


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
