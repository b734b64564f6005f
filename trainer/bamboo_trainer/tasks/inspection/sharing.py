"""Parameters that layers share without a word in `Task.tied`: tied as well, or refused with their names.

In one process layers that share a parameter train one object. Spread over workers each would train its own, so what is
shared has to be known before the layers are: every worker looks for it at its start, the same way. One layer after the
other is made, and dropped, without its first values, which takes next to no time; in a child process, so that no
factory remembers such a layer. If a factory needs the values, layers are made with them.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bamboo_trainer.task import Task
from bamboo_trainer.tasks.child import from_child
from bamboo_trainer.tasks.inspection.no_values import NoValues
from bamboo_trainer.tasks.running_buffers import running_modules, shared_buffer
from bamboo_trainer.tasks.task_errors import TaskError, told
from bamboo_trainer.tasks.ties import forbid_training
from bamboo_trainer.tasks.user_code import build_layer

logger = logging.getLogger(__name__)

Names = tuple[str, ...]


class Shared(NamedTuple):
    """What layers share, and what goes along with them."""

    groups: tuple[Names, ...]  # names of one and the same parameter, one of each layer
    aliases: dict[str, str]  # its further names in a layer, with that one
    handed_out: tuple[int, ...]  # layers whose factories do not make all their parameters anew at each call
    overlaps: tuple[Names, ...]  # names of two tensors that are not one, but lie in the same memory
    running: tuple[Names, ...]  # names of one buffer that the forwards of two layers update


def settled(task: Task, seed: int) -> Task:
    """The task with all that its layers share tied, and with factories that make a layer of its own at each call.

    Raises TaskError for what cannot be tied.
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
    for group in shared.groups:
        logger.info("%s are one parameter, and are tied", " and ".join(group))
    given = HandedOut(task, seed, shared.handed_out)
    layers = [partial(given.copy, i) if i in shared.handed_out else layer for i, layer in enumerate(task.layers)]
    tied = [tuple(shared.aliases.get(name, name) for name in names) for names in task.tied]
    return replace(task, layers=layers, tied=merged(tied, shared.groups))


class HandedOut:
    """Layers whose factories hand out what they, or others, have handed out before.

    They are made once, at once and in order, and stay as they are: each stage of a worker gets copies. So their first
    values depend neither on which of them a worker makes first nor on what it has trained meanwhile. A layer or loss
    that uses one of these, and not a copy, is refused by name as soon as it does.
    """

    def __init__(self, task: Task, seed: int, layers: Sequence[int]) -> None:
        self._layers = {i: build_layer(task, seed, i) for i in layers}
        for index, layer in self._layers.items():
            forbid_training(layer, index)

    def copy(self, layer: int) -> nn.Module:
        try:
            return deepcopy(self._layers[layer])
        except Exception as error:
            raise TaskError(
                f"its factory does not make a new layer at each call, and it cannot be copied ({told(error)})"
            ) from error


def merged(tied: Iterable[Names], shared: Iterable[Names]) -> tuple[Names, ...]:
    """One group for all groups that have a name in common; the first name of the first one stays the first."""
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


# looking


def _look(task: Task, seed: int) -> Shared:
    seen, problem = from_child(_without_values(task, seed))
    if not problem:
        return seen[-1]
    logger.info("layers are made with their values to see what they share: %s", problem)
    *_, found = Search(task, seed).layers()
    return found


def _without_values(task: Task, seed: int) -> Iterator[Shared]:
    warnings.simplefilter("ignore")  # of values that are not kept
    yield from Search(task, seed, NoValues).layers()


@dataclass(frozen=True, slots=True)
class _Place:
    """The memory in which a tensor lies."""

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
    """Makes every layer twice. Nothing but what the factories themselves keep outlives its turn."""

    def __init__(self, task: Task, seed: int, within: Callable[[], AbstractContextManager[object]] = nullcontext):
        """within: makes what is entered around each factory."""
        self._task, self._seed, self._within = task, seed, within
        self._first: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}  # by id: a tensor, its layer and name
        self._places: dict[int, list[_Place]] = {}  # by storage
        self._groups: dict[str, list[str]] = {}  # by first name
        self._aliases: dict[str, str] = {}
        self._handed_out: set[int] = set()
        self._overlaps: list[Names] = []
        self._running: list[Names] = []

    def layers(self) -> Iterator[Shared]:
        """What is found so far, after each layer."""
        for again in (False, True):
            for layer in range(len(self._task.layers)):
                module = build_layer(self._task, self._seed, layer, self._within())
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad:
                        self._see(layer, f"{layer}.{name}", parameter, again)
                for one in running_modules(module):
                    if not one.contributes:
                        continue
                    for name, buffer in one.buffers.items():
                        self._see_running(layer, f"{layer}.{one.place(name)}", buffer, again)
                if not again:
                    self._name(layer, module)
                    self._lay(layer, module)
                yield self._found()

    def _found(self) -> Shared:
        return Shared(
            groups=tuple(map(tuple, self._groups.values())),
            aliases=self._aliases,
            handed_out=tuple(sorted(self._handed_out)),
            overlaps=tuple(self._overlaps),
            running=tuple(self._running),
        )

    def _see(self, layer: int, name: str, parameter: nn.Parameter, again: bool) -> None:
        known = self._before(layer, name, parameter, again)
        if known and not again and known[0] != layer:
            self._groups.setdefault(known[1], [known[1]]).append(name)
            self._handed_out |= {known[0], layer}

    def _see_running(self, layer: int, name: str, buffer: Tensor, again: bool) -> None:
        known = self._before(layer, name, buffer, again)
        if known and not again and known[1] != name:
            self._running.append((known[1], name))

    def _before(self, layer: int, name: str, tensor: Tensor, again: bool) -> tuple[int, str] | None:
        """The layer and name under which that very tensor was seen before, if it was."""
        known = self._first.get(id(tensor))
        if known is None or known[0]() is not tensor:
            if not again:
                self._first[id(tensor)] = (weakref.ref(tensor), layer, name)
            return None
        if again:
            self._handed_out.add(layer)
        return known[1], known[2]

    def _name(self, layer: int, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name != names[id(parameter)]:
                self._aliases[f"{layer}.{name}"] = f"{layer}.{names[id(parameter)]}"

    def _lay(self, layer: int, module: nn.Module) -> None:
        """Note where the layer's tensors lie, and which lie where another one does that is trained."""
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
                    self._overlaps.append((other.name, place.name))
            self._places[storage.cdata] = [*others, place]


def _overlap(a: _Place, b: _Place) -> bool:
    """Have two tensors of one storage an element in common?"""
    if a.dtype != b.dtype:
        return True
    first, end = max(a.offset, b.offset), min(a.end, b.end)
    if first >= end or (a.dense and b.dense):
        return first < end
    begin = min(a.offset, b.offset)
    marks = torch.zeros(max(a.end, b.end) - begin, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride, a.offset - begin).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride, b.offset - begin).any())
