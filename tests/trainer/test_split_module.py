"""A plain module becomes layers."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import plain_models
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.from_module import from_module
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.user_code import build_layer
from from_module_kit import model_of, small, squared_error


def test_a_layer_has_the_same_values_whoever_makes_it_and_another_one_has_others() -> None:
    one, other = (plain_models.build({"model": "dictionaries"}) for _ in range(2))
    third = build_layer(one, 5, 3).state_dict()
    assert all(torch.equal(t, third[k]) for k, t in build_layer(other, 5, 3).state_dict().items())
    fourth = build_layer(other, 5, 4).state_dict()
    weight = "module.blocks.{}.linear.weight"
    assert not torch.equal(third[weight.format(2)], fourth[weight.format(3)])


def test_a_copy_of_a_layer_has_tensors_of_its_own() -> None:
    """As a stage makes it of a layer that is frozen in part. torch warns of copies of tensors without values."""
    task = plain_models.build({"model": "dictionaries"})
    inputs, _ = task.dataset.batch([0, 1])
    for index in (0, len(task.layers) - 1):
        layer = build_layer(task, 5, index)
        copied = deepcopy(layer)
        own, others = dict(layer.named_parameters()), dict(copied.named_parameters())
        assert own.keys() == others.keys()
        assert all(torch.equal(own[name], others[name]) and own[name] is not others[name] for name in own)
    first = build_layer(task, 5, 0)
    for one, other in zip(first(*inputs), deepcopy(first)(*inputs), strict=True):
        assert torch.equal(one, other)


def test_the_whole_model_is_never_held() -> None:
    """Its blocks would take 160 TB; the first and the last layer are made all the same, and costs are counted."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 1)
            self.blocks = nn.ModuleList(nn.Linear(1, 10_000_000, bias=False) for _ in range(2))
            self.blocks.extend(nn.Linear(1_000_000, 10_000_000, bias=False) for _ in range(4))
            self.last = nn.Linear(10_000_000, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x[..., : block.in_features])
            out: Tensor = self.last(x)
            return out

    data = TensorDataset((torch.rand(8, 4),), (torch.rand(8, 1),))
    task = from_module(
        Huge, loss=squared_error, dataset=data, optimizer=plain_models.optimizer, learning_rate=lambda _: 1.0
    )
    assert build_layer(task, 0, 0).module.first.weight.shape == (1, 4)
    assert build_layer(task, 0, 7).module.last.weight.shape == (1, 10_000_000)
    costs = layer_costs(task, 2)
    assert len(costs) == 8
    assert min(costs[3:7]) > 1e14 > costs[7] > costs[0]


def test_the_lists_that_a_parametrization_keeps_are_no_blocks() -> None:
    make = model_of(lambda m, x: m.norm(m.blocks[2](m.blocks[1](m.blocks[0](x)))))

    def parametrized() -> nn.Module:
        model: nn.Module = make()
        model.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        return model

    assert len(from_module(parametrized, **small()).layers) == 4


def test_a_block_that_uses_what_it_does_not_have_is_refused() -> None:
    class Outside(nn.Module):
        def __init__(self, shared: list[nn.Module]) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.shared[0](x)
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.blocks = nn.ModuleList(Outside([self.norm]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)) * 1

    with pytest.raises(ValueError, match=r"blocks.0 uses norm.weight, which it does not have"):
        from_module(Model, **small())
