"""Tied parameters: several names, one value. On each stage that holds any of them they are one object."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer, named_layer


def tied_groups(task: Task) -> dict[str, tuple[int, str]]:
    """Return the number and the first name of each tied name's group. Raises TaskError for invalid names."""
    groups: dict[str, tuple[int, str]] = {}
    for number, names in enumerate(task.tied):
        if len(set(names)) < 2:
            raise TaskError(f"tied group {number} names {len(set(names))} parameters, expected at least two")
        for name in names:
            layer, _, parameter = name.partition(".")
            if not layer.isdecimal() or int(layer) >= len(task.layers) or not parameter:
                raise TaskError(f'tied name {name!r} is not "<layer index>.<parameter name>" of this task')
            if name in groups:
                raise TaskError(f"tied name {name!r} appears twice")
            groups[name] = (number, names[0])
    return groups


def tie(
    layers: Mapping[int, nn.Module],
    groups: Mapping[str, tuple[int, str]],
    task: Task,
    seed: int,
    *,
    apart: bool = False,
) -> dict[int, tuple[int, str]]:
    """Make the tied parameters one object per group, with the value of the group's first name.

    apart: trained ones stay one object per group and layer, with the same value, so that each layer's gradient stays
    separate. Returns each such object's group and first name, by its id.
    """
    sources: dict[int, nn.Parameter] = {}
    shared: dict[tuple[int, int | None], nn.Parameter] = {}
    for name, (group, first) in groups.items():
        index, path = _split(name)
        if index not in layers:
            continue
        mine = _parameter(layers[index], index, path)
        if group not in sources:
            first_index, first_path = _split(first)
            source = layers[first_index] if first_index in layers else build_layer(task, seed, first_index)
            sources[group] = _parameter(source, first_index, first_path)
        one = sources[group]
        if mine.shape != one.shape or mine.requires_grad != one.requires_grad:
            raise TaskError(f"tied parameters {first} {list(one.shape)} and {name} {list(mine.shape)} differ")
        place = (group, index if apart and mine.requires_grad else None)
        if place not in shared:
            shared[place] = mine if place[1] is not None else one
            with torch.no_grad():
                shared[place].copy_(one)
        one = shared[place]
        for module in layers[index].modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is mine:
                    setattr(module, leaf, one)
    firsts = dict(groups.values())
    return {id(parameter): (group, firsts[group]) for (group, _), parameter in shared.items()}


def _split(name: str) -> tuple[int, str]:
    index, _, path = name.partition(".")
    return int(index), path


def _parameter(layer: nn.Module, index: int, path: str) -> nn.Parameter:
    try:
        return layer.get_parameter(path)
    except AttributeError:
        raise TaskError(f"tied parameter {index}.{path}: layer {index} has no parameter {path!r}") from None


def forbid_training(layer: nn.Module, index: int) -> None:
    """Forbid training a layer that is made in addition to the stages' layers, and that the task's code may have kept.

    A backward that reaches one of its parameters, however late, raises TaskError.
    """
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            what = f"parameter {name!r} of {named_layer(layer, index)}"
            parameter.register_post_accumulate_grad_hook(_refuse(what))  # type: ignore[no-untyped-call]


def _refuse(what: str) -> Callable[[Tensor], None]:
    """Return a hook. It holds nothing of the layer, which otherwise would not be freed at once."""

    def reached(_: Tensor) -> None:
        raise TaskError(
            f"a layer or the loss uses {what} without having it (Module.named_parameters), and not the one that is "
            f"trained; {HAVE_IT}"
        )

    return reached


HAVE_IT: Final = "let each layer that uses it have it as an attribute, and Bamboo ties them"


def stranger(outputs: Iterable[Tensor], own: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Return a parameter that a backward from these outputs would reach, and that is not in `own`; else None."""
    known = {id(parameter) for parameter in own}
    nodes: list[Any] = [part.grad_fn for part in outputs if part.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)  # of the graph's leaves
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            return variable
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return None
