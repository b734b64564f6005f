"""Tied parameters: one value with several names. `tie` applies `Task.tied`; `Search` finds other shared parameters.

`settled` ties shared parameters, too, or raises TaskError. In one process, layers that share a parameter train one
object; on several workers, each layer would train a copy of its own. So every worker searches for shared parameters, in
the same way, before the layers are placed. The search builds one layer after the other in a child process, so that no
factory remembers these layers, and without initial values, which takes hardly any time. If that fails, for instance
because a factory needs the values, the search is repeated in this process, with values.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection import NoValues, from_child
from bamboo_trainer.tasks.running_buffers import running_norms, shared_buffer
from bamboo_trainer.tasks.task_errors import TaskError, describe
from bamboo_trainer.tasks.user_code import build_layer, named_layer


def tied_groups(task: Task) -> dict[str, tuple[int, str]]:
    """Map each tied name to its group's index in `Task.tied` and its group's first name. Raises TaskError."""
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
    """Make the tied parameters of `layers` one object per group, with the value of the group's first name. Return each
    object's group and that group's first name, by the object's id(). Raises TaskError if a named parameter is missing,
    or differs from the group's first one in shape or requires_grad.

    apart: make one object per group and layer for trained parameters, so that each layer's gradient stays separate.
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
    """Forbid training a layer that belongs to no stage, but to which the task's code may have kept a reference.

    Any later backward that reaches one of its trained parameters raises TaskError.
    """
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            what = f"parameter {name!r} of {named_layer(layer, index)}"
            parameter.register_post_accumulate_grad_hook(_refuse(what))  # type: ignore[no-untyped-call]


def _refuse(what: str) -> Callable[[Tensor], None]:
    """Return a hook that raises TaskError. It holds no reference to the layer, so that the layer is freed at once."""

    def reached(_: Tensor) -> None:
        raise TaskError(
            f"a layer or the loss uses {what} without having it (Module.named_parameters), and not the one that is "
            f"trained; {HAVE_IT}"
        )

    return reached


HAVE_IT: Final = "let each layer that uses it have it as an attribute, and Bamboo ties them"


def stranger(outputs: Iterable[Tensor], own: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Return a parameter outside `own` that a backward from these outputs would reach; None if there is none."""
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


logger = logging.getLogger(__name__)

Names = tuple[str, ...]


@dataclass(slots=True)
class Shared:
    """The tensors that layers share. groups: each shared parameter's names, one per layer that has it, by the first.

    aliases: a parameter's first name in its layer, by each other name in that layer. handed_out: indices of layers
    whose factories do not create every tensor anew at each call. overlaps: pairs of names of different tensors in the
    same memory, at least one of them trained. running: pairs of names of one buffer that two modules' forwards update.
    """

    groups: dict[str, list[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    handed_out: set[int] = field(default_factory=set)
    overlaps: list[Names] = field(default_factory=list)
    running: list[Names] = field(default_factory=list)


def settled(task: Task, seed: int) -> Task:
    """Return the task with all shared parameters tied, and with factories that create a separate layer at each call.

    Raises TaskError for sharing that cannot be tied.
    """
    shared = _look(task, seed)
    if shared.overlaps:
        one, other = shared.overlaps[0]
        raise TaskError(
            f"{one} and {other} lie in the same memory without being one parameter, which would hold on one worker "
            "only: use one nn.Parameter for both, or copies of its own for each"
        )
    if shared.running:
        raise shared_buffer(*shared.running[0])
    if not shared.handed_out:
        return task
    for group in shared.groups.values():
        logger.info("%s are one parameter, and are tied", " and ".join(group))
    # Layers whose factories return objects that they, or others, have returned before are built once, here and in
    # order, and stay unchanged: each stage of a worker gets copies. So their initial values depend neither on which of
    # them a worker builds first nor on what it has trained meanwhile.
    built = {i: build_layer(task, seed, i) for i in sorted(shared.handed_out)}
    for index, layer in built.items():
        forbid_training(layer, index)
    layers = [partial(_copy, built[i]) if i in built else factory for i, factory in enumerate(task.layers)]
    tied = [tuple(shared.aliases.get(name, name) for name in names) for names in task.tied]
    return replace(task, layers=layers, tied=joined_groups(tied, shared.groups.values()))


def _copy(layer: nn.Module) -> nn.Module:
    try:
        return deepcopy(layer)
    except Exception as error:
        raise TaskError(
            f"its factory does not make a new layer at each call, and it cannot be copied ({describe(error)})"
        ) from error


def joined_groups(tied: Iterable[Names], shared: Iterable[Sequence[str]]) -> tuple[Names, ...]:
    """Return all groups, merged where they share a name; the first name of the first merged group stays first."""
    groups: list[list[str]] = [list(names) for names in tied]
    for names in shared:
        joined = [group for group in groups if set(group) & set(names)]
        if not joined:
            groups.append(list(names))
            continue
        for group in joined[1:]:
            groups.remove(group)
        whole = dict.fromkeys([*(name for group in joined for name in group), *names])
        joined[0][:] = whole
    return tuple(tuple(group) for group in groups)


# the search


def _look(task: Task, seed: int) -> Shared:
    seen, problem = from_child(_without_values(task, seed))
    if not problem:
        return seen[-1]
    logger.info("layers are made with their values to see what they share: %s", problem)
    *_, shared = Search(task, seed).layers()
    return shared


def _without_values(task: Task, seed: int) -> Iterator[Shared]:
    warnings.simplefilter("ignore")  # about discarded values
    yield from Search(task, seed, NoValues).layers()


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    tensor: "weakref.ref[Tensor]"
    storage: StorageWeakRef
    trained: bool
    offset: int  # elements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    @property
    def end(self) -> int:
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def dense(self) -> bool:
        return self.end - self.offset == self.shape.numel()


class Search:
    """A search for shared parameters and memory, which builds every layer twice. It holds only weak references to
    tensors, so it recognizes a tensor of an earlier layer only if a factory has kept it.
    """

    def __init__(self, task: Task, seed: int, within: Callable[[], AbstractContextManager[object]] = nullcontext):
        """Prepare the search. within: returns a context to enter around each factory."""
        self._task, self._seed, self._within = task, seed, within
        self._first: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}  # by id: a tensor, its layer and name
        self._places: dict[int, list[_Place]] = {}  # by storage
        self._found = Shared()

    def layers(self) -> Iterator[Shared]:
        """Build all layers, twice; after each layer, yield the results so far, always as the same object."""
        for again in (False, True):
            for layer in range(len(self._task.layers)):
                module = build_layer(self._task, self._seed, layer, self._within())
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad:
                        self._see(layer, f"{layer}.{name}", parameter, again)
                for one in running_norms(module):
                    if not one.contributes:
                        continue
                    for name, buffer in one.buffers.items():
                        place = f"{layer}.{one.place(name)}"
                        known = self._before(layer, place, buffer, again)
                        if known and not again and known[1] != place:
                            self._found.running.append((known[1], place))
                if not again:
                    self._name(layer, module)
                    self._lay(layer, module)
                yield self._found

    def _see(self, layer: int, name: str, parameter: nn.Parameter, again: bool) -> None:
        known = self._before(layer, name, parameter, again)
        if known and not again and known[0] != layer:
            self._found.groups.setdefault(known[1], [known[1]]).append(name)
            self._found.handed_out |= {known[0], layer}

    def _before(self, layer: int, name: str, tensor: Tensor, again: bool) -> tuple[int, str] | None:
        """Return the layer and name under which this same object was seen first; None if it is new. In the first pass,
        record a new tensor; in the second (`again`), record that the layer's factory returned an earlier one.
        """
        known = self._first.get(id(tensor))
        if known is None or known[0]() is not tensor:
            if not again:
                self._first[id(tensor)] = (weakref.ref(tensor), layer, name)
            return None
        if again:
            self._found.handed_out.add(layer)
        return known[1], known[2]

    def _name(self, layer: int, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name != names[id(parameter)]:
                self._found.aliases[f"{layer}.{name}"] = f"{layer}.{names[id(parameter)]}"

    def _lay(self, layer: int, module: nn.Module) -> None:
        """Record where the layer's tensors lie in memory, and overlaps with others if one of the two is trained."""
        named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in named:
            if tensor.layout is not torch.strided or is_lazy(tensor) or not tensor.numel():
                continue
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            place = _Place(
                f"{layer}.{name}",
                weakref.ref(tensor),
                storage,
                trained,
                int(tensor.storage_offset()),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            others = [p for p in self._places.get(storage.cdata, ()) if not p.gone]
            for other in others:
                if other.tensor() is not tensor and (trained or other.trained) and _overlap(place, other):
                    self._found.overlaps.append((other.name, place.name))
            self._places[storage.cdata] = [*others, place]


def _overlap(a: _Place, b: _Place) -> bool:
    """Return whether two tensors of one storage share an element. Different dtypes count as overlapping."""
    if a.dtype != b.dtype:
        return True
    first, end = max(a.offset, b.offset), min(a.end, b.end)
    if first >= end or (a.dense and b.dense):
        return first < end
    begin = min(a.offset, b.offset)
    marks = torch.zeros(max(a.end, b.end) - begin, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride, a.offset - begin).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride, b.offset - begin).any())
