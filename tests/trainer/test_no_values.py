"""Layers that are built only to be looked at get no first values."""

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from bamboo_trainer.tasks.inspection.no_values import NoValues, values_wanted


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
