"""Models that `from_module` splits, whose layers repeat the forward's code around the blocks, and refused models."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bamboo_trainer.from_module import from_module
from bamboo_trainer.split.recording import CannotSplit
from from_module_kit import Cache, TwoArguments, layers_of, model_of, run, small, whole


def out_of_order(model: Any, x: Tensor) -> Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def once_more(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return model.blocks[2](x)


def with_a_value(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x) if x.sum() > 0 else x
    return x


def with_a(value: Callable[[Any, Tensor], Any]) -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x, value(model, x))
        return x

    return model_of(forward, TwoArguments)


def nothing(model: Any, x: Tensor) -> dict[str, int]:
    for block in model.blocks:
        x = block(x)
    return {"a": 1}


def failing(model: Any, x: Tensor) -> Tensor:
    raise RuntimeError("no way")


def writing_elsewhere(model: Any, x: Tensor) -> Tensor:
    y = model.norm(x) * 1
    part = y[:, :3]
    x = model.blocks[0](y)
    part.mul_(2)
    x = model.blocks[1](x) + y
    return model.blocks[2](x)


def inferring(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        x = model.blocks[0](x)
    return model.blocks[2](model.blocks[1](x))


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (model_of(out_of_order), {}, "blocks.2 is called before blocks.0: the blocks have to be called in their order"),
        (model_of(once_more), {}, "blocks.2 is called after blocks.2"),
        (model_of(lambda m, x: m.blocks[1](m.blocks[0](x))), {}, "blocks.2 is not called by the model's forward"),
        (model_of(nothing), {}, "the model returns no tensor"),
        (model_of(with_a_value), {}, "its forward goes another way depending on values (tests/trainer/test_recording"),
        (model_of(failing), {}, "its forward on tensors without data raised RuntimeError: no way"),
        (
            with_a(lambda m, x: Cache()),
            {},
            "blocks.0 gets something that has a value of type Cache, which cannot go from",
        ),
        (with_a(lambda m, x: m.norm.weight), {}, "blocks.0 is called with a parameter or buffer of the model's"),
        (
            model_of(writing_elsewhere),
            {},
            "after blocks.0 the model's forward writes to a tensor that shares its memory",
        ),
        (model_of(inferring), {}, "calls blocks.0 with torch.inference_mode around it: use it within the block"),
        (model_of(lambda m, x: x), {"blocks": "layers"}, "blocks: the model has no 'layers'"),
        (
            model_of(lambda m, x: x),
            {"blocks": "norm"},
            "blocks: 'norm' is a LayerNorm of the model, expected a ModuleList",
        ),
        (
            lambda: nn.Linear(4, 4),
            {},
            "blocks must name the model's ModuleList or Sequential of blocks; of those it has",
        ),
        (lambda: nn.ModuleDict({"features": nn.Sequential(nn.Linear(4, 4))}), {}, "of those it has: 'features'"),
        (lambda: nn.Linear(-1, 4), {}, "the model cannot be built without data: RuntimeError"),
        (lambda: 3, {}, "what makes the model returned int, expected a torch.nn.Module"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(make: Any, given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(CannotSplit) as refused:
        from_module(make, **given, **small())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


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
    """Layers repeat the operations of the model's forward around its blocks, in jobs of fp32 and bf16 precision."""
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
    """If control flow depends on values, `from_module` runs one block of each class with values, and not all blocks."""
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
    """A model that gives its blocks a mask only for some values is refused in the first microbatch without a mask."""

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
