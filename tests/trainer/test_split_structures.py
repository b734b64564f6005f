"""What blocks pass to each other."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bamboo_trainer.from_module import from_module
from bamboo_trainer.split.structures import CannotSplit
from from_module_kit import Cache, TwoArguments, model_of, small


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
        (model_of(with_a_value), {}, "its forward goes another way depending on values (tests/trainer/test_split_"),
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
