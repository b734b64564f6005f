"""A model and, beside it in the same pipeline, what it was when training began.

Each layer computes twice: with its parameters, and without gradients with the first values of those that are trained.
Of these it has frozen copies, which go wherever its parameters go, and are no part of an export or a state dict. What
is frozen in the model anyway, as all but the adapters of `bamboo_trainer.lora`, both use.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bamboo_trainer.task import Parts, Task
from bamboo_trainer.tasks.inspection.costs import layer_without_values

REFERENCE: Final = "reference"  # the module with a layer's copies


class ReferenceValues(nn.Module):
    """Frozen copies of a layer's trained parameters, by their names with "/" for each dot. A layer's state dict is
    without them.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                self.register_parameter(copy_name(name), copy)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


def copy_name(name: str) -> str:
    """What the copy of a parameter is called."""
    return name.replace(".", "/")


def with_reference(task: Task) -> Task:
    """The task whose last layer returns what it returned, and behind it what the model would return that has the first
    values. Dropout must be off; layers pass on tensors of floats, and others that no parameter has a part in.
    """
    return replace(
        task,
        layers=tuple(partial(_with_copies, factory, first=not index) for index, factory in enumerate(task.layers)),
        tied=(*task.tied, *_tied_copies(task)),
    )


def has_reference(layer: nn.Module | None) -> bool:
    """Does it compute what its reference would?"""
    return isinstance(getattr(layer, REFERENCE, None), ReferenceValues)


def begin_reference(layer: nn.Module) -> None:
    """Copies the layer's values anew, if it has a reference: they have become other ones since it was made."""
    if has_reference(layer):
        with torch.no_grad():
            for parameter, copy, _ in _pairs(layer):
                copy.copy_(parameter)


def _with_copies(factory: Callable[[], nn.Module], *, first: bool) -> nn.Module:
    layer = factory()
    layer.add_module(REFERENCE, ReferenceValues(layer))
    layer.__dict__["forward"] = partial(_twice, layer, layer.forward, first)
    return layer


def _twice(layer: nn.Module, forward: Callable[..., Any], first: bool, *parts: Tensor) -> Parts:
    """What the layer passes on, and behind it the floats of what its reference does: all else both have in common."""
    own, of_reference = (parts, parts) if first else _apart(parts)
    passed = _as_parts(forward(*own))
    with torch.no_grad(), _first_values(layer):
        beside = _as_parts(forward(*of_reference))
    return (*passed, *(part for part in beside if part.is_floating_point()))


def _apart(parts: Parts) -> tuple[Parts, Parts]:
    """The parts of the model and of its reference, which are as many."""
    floats = 0
    for count, part in enumerate(parts, start=1):
        floats += part.is_floating_point()
        if count + floats == len(parts):
            others = iter(parts[count:])
            return parts[:count], tuple(next(others) if p.is_floating_point() else p for p in parts[:count])
    raise ValueError(f"expected the parts of a model and of its reference, got {len(parts)}")


def _as_parts(returned: Tensor | Parts) -> Parts:
    return (returned,) if isinstance(returned, Tensor) else returned


@contextmanager
def _first_values(layer: nn.Module) -> Iterator[None]:
    """A block in which the layer has the copies instead of its trained parameters."""
    pairs = list(_pairs(layer))
    try:
        for parameter, copy, places in pairs:
            for module, leaf in places:
                module._parameters[leaf] = copy.to(parameter.dtype)  # type: ignore[assignment]
        yield
    finally:
        for parameter, _, places in pairs:
            for module, leaf in places:
                module._parameters[leaf] = parameter


def _pairs(layer: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each trained parameter with its copy, and where the layer has it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in layer.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    copies: Mapping[str, Any] = layer.get_submodule(REFERENCE)._parameters
    for name, parameter in layer.named_parameters():
        if copy_name(name) in copies:
            yield parameter, copies[copy_name(name)], places[id(parameter)]


def _tied_copies(task: Task) -> Iterator[tuple[str, ...]]:
    """The copies of tied parameters are tied themselves, if these are trained."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for names in task.tied:
        copies: dict[str, None] = {}
        for name in names:
            index, _, path = name.partition(".")
            layer = layer_without_values(task, int(index), mode)
            wanted = layer.get_parameter(path)
            found = next(first for first, parameter in layer.named_parameters() if parameter is wanted)
            if wanted.requires_grad:
                copies[f"{index}.{REFERENCE}.{copy_name(found)}"] = None
        if len(copies) > 1:
            yield tuple(copies)
