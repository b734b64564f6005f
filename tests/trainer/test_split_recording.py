"""What a module's forward does around and between its blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bamboo_trainer.from_module import from_module
from from_module_kit import TwoArguments, layers_of, model_of, run, small, whole


def under_autocast(model: Any, x: Tensor) -> Tensor:
    x = model.norm(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for block in model.blocks:
            x = block(x)
    return x.float()


def without_autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        for block in model.blocks:
            x = block(x)
    return x.float()


def partly_without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.blocks[1](model.blocks[0](model.norm(x)))
    return model.blocks[2](x)  # type: ignore[no-any-return]


def through_a_view(model: Any, x: Tensor) -> Tensor:
    y = model.norm(x)
    x = model.blocks[0](y * 1)
    x[:, :3].mul_(2)
    x = model.blocks[1](x)
    y[:, 1:].add_(1)
    return model.blocks[2](x) + y  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", [under_autocast, without_autocast, partly_without_gradients, through_a_view])
def test_what_the_forward_does_around_and_between_blocks_is_done(forward: Any, precision: torch.dtype) -> None:
    """Also in a job whose own precision is bf16."""
    make = model_of(forward)
    task = from_module(make, **small())
    layers, model = whole(task, make)
    inputs, targets = task.dataset.batch([1, 4, 5])
    with torch.autocast("cpu", dtype=precision, enabled=precision is not torch.float32):
        results, expected = run(layers, inputs), model(*inputs)
    assert torch.equal(results[0], expected)
    task.loss((results[0].float(),), targets).backward()
    nn.functional.mse_loss(expected.float(), targets[0]).backward()
    named = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    for key, parameter in model.named_parameters():
        assert (named[key] is None) == (parameter.grad is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(named[key], parameter.grad)


def test_a_block_whose_way_depends_on_values_is_run_with_some() -> None:
    """And one of its class is, not all."""
    runs = []

    class Routed(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            runs.append(isinstance(x, FakeTensor))
            return x.index_add(0, rows, super().forward(x[rows])), 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Routed(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, _ = block(x)
            return x

    task = from_module(Model, **small())
    assert runs == [False]
    layers, model = whole(task, Model)
    x = torch.randn(6, 4)
    assert torch.equal(run(layers, (x,))[0], model(x))


def test_what_depends_on_values_and_not_on_shapes_is_refused_when_it_shows() -> None:
    """A mask that is left out when it masks nothing: what is passed on would differ from microbatch to microbatch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(TwoArguments() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            mask = x * 1
            if not isinstance(x, FakeTensor) and bool((x > 0).all()):
                mask = 0
            for block in self.blocks:
                x = block(x, mask)
            return x

    layers = layers_of(from_module(Model, **small()))
    run(layers, (torch.tensor([[1.0, 0.0, 1.0, 1.0]]),))
    with pytest.raises(ValueError, match=r"blocks.0 is called with something else than when the model was split"):
        run(layers, (torch.ones(1, 4),))
