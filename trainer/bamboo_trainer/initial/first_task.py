"""A task whose layers begin with other weights: each worker reads those of the layers that it builds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bamboo_core.job.spec import InitialSpec
from bamboo_core.storage.errors import StorageError
from bamboo_trainer.checkpoint.sources import StateSource
from bamboo_trainer.checkpoint.state_dict import StateEntry, by_file
from bamboo_trainer.initial.matching import (
    FIELD,
    Matching,
    Take,
    WantedTensor,
    is_adapters,
    match,
)
from bamboo_trainer.initial.opening import open_weights
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection.no_values import values_wanted
from bamboo_trainer.tasks.inspection.walk import Walk, look
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tied_groups
from bamboo_trainer.tasks.user_code import same_bits

logger = logging.getLogger(__name__)

_OF_LAYER = "module."  # prefix of the whole module's names in a layer of a split one


class _Form(NamedTuple):
    """A tensor of a layer: all its names there."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class _LayerForms(NamedTuple):
    split: bool
    tensors: tuple[_Form, ...]


class FirstTask:
    """The task with its initial weights. The first `get` opens the weights, and reports what is taken."""

    def __init__(self, spec: InitialSpec | None, task: Task, tell: Callable[[str], None]) -> None:
        self._spec, self._plain, self._tell = spec, task, tell
        self._made: Task | None = None

    def get(self) -> Task:
        """Return the task. Raises TaskError if the weights do not fit the model."""
        if self._spec is None:
            return self._plain
        if self._made is None:
            self._made, lines = begin_with(self._spec, self._plain)
            for line in lines:
                logger.info("%s", line)
            self._tell("; ".join(lines))
        return self._made


def begin_with(spec: InitialSpec, task: Task) -> tuple[Task, list[str]]:
    """Return the task whose layers have the weights as first values, and sentences on tensors taken, left and
    initialized as usual.

    Raises TaskError.
    """
    forms = look(task, (), _form_of)
    split = all(form.split for form in forms)
    wanted, opened = _wanted(task, forms, split), open_weights(spec)
    if not any(is_adapters(name) for one in wanted for name in one.names):
        opened = opened.with_merged_adapters()
    matching = match(wanted, opened.offered(of_module=split), spec, opened.shown)
    takes = _by_layer(matching)
    layers = [
        partial(_begun, factory, takes[index], opened.source) if index in takes else factory
        for index, factory in enumerate(task.layers)
    ]
    return replace(task, layers=layers), matching.in_words(opened.shown, opened.adapters)


# The model's tensors


def _form_of(walk: Walk, index: int, _: object) -> tuple[_LayerForms, object]:
    layer = walk.layer(index)
    names: dict[int, list[str]] = {}
    tensors = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    for name, tensor in layer.state_dict(keep_vars=True).items():
        if id(tensor) in tensors:
            names.setdefault(id(tensor), []).append(name)
    found = (
        _Form(tuple(own), tuple(tensors[known].shape), str(tensors[known].dtype).removeprefix("torch."))
        for known, own in names.items()
    )
    return _LayerForms(isinstance(layer, SplitLayer), tuple(found)), ()


def _wanted(task: Task, forms: Sequence[_LayerForms], split: bool) -> list[WantedTensor]:
    """Return the model's tensors; tied parameters are one. split: use the names in the whole module."""
    groups = tied_groups(task)
    together: dict[object, list[tuple[int, _Form]]] = {}
    for layer, form in enumerate(forms):
        for tensor in form.tensors:
            group = next((groups[f"{layer}.{n}"][0] for n in tensor.names if f"{layer}.{n}" in groups), None)
            key: object = (layer, tensor.names[0]) if group is None else group
            together.setdefault(key, []).append((layer, tensor))
    return [_one(places, split) for places in together.values()]


def _one(places: Sequence[tuple[int, _Form]], split: bool) -> WantedTensor:
    called = [
        name.removeprefix(_OF_LAYER) if split else f"layers.{layer}.{name}"
        for layer, form in places
        for name in form.names
    ]
    first = places[0][1]
    return WantedTensor(
        names=tuple(dict.fromkeys(called)),
        places=tuple((layer, form.names[0]) for layer, form in places),
        shape=first.shape,
        dtype=getattr(torch, first.dtype),
    )


# Reading


def _by_layer(matching: Matching) -> dict[int, list[tuple[str, Take]]]:
    found: dict[int, list[tuple[str, Take]]] = {}
    for take in matching.takes:
        for layer, name in take.wanted.places:
            found.setdefault(layer, []).append((name, take))
    return found


def _begun(factory: Callable[[], nn.Module], takes: Sequence[tuple[str, Take]], source: StateSource) -> nn.Module:
    """Build a layer with the taken values."""
    layer = factory()
    if not values_wanted():
        return layer
    own = layer.state_dict(keep_vars=True)
    found = _read(source, [entry for _, take in takes for offer in take.offers for entry in offer.entries])
    with torch.no_grad():
        for name, take in takes:
            value = _value(take, found)
            if own[name].shape != value.shape:
                raise TaskError(f"{FIELD}: {take.offers[0].name} has changed while it was read")
            own[name].copy_(value)
    return layer


def _read(source: StateSource, entries: Sequence[StateEntry]) -> dict[str, Tensor]:
    """Return the tensors by the names of their entries; each file is read once."""
    found: dict[str, Tensor] = {}
    try:
        for file, wanted in by_file(entries).items():
            tensors = source.tensors(file, wanted)
            for entry in wanted:
                stored = tensors[entry.tensor]
                found[entry.name] = torch.view_as_complex(stored) if entry.complex else stored
    except StorageError as error:
        raise TaskError(f"{FIELD}: {error}") from None
    return found


def _value(take: Take, found: Mapping[str, Tensor]) -> Tensor:
    """Return the value; if it is stored several times, all must be equal."""
    first, *others = [entry for offer in take.offers for entry in offer.entries]
    for entry in others:
        if not same_bits(found[entry.name], found[first.name]):
            raise TaskError(
                f"{FIELD}: {first.name} and {entry.name} differ, and are one tensor of the model "
                f"({', '.join(take.wanted.names[:2])}): drop one of them"
            )
    return found[first.name]
