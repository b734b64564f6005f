"""`task.initialFrom`: other weights as the first values of a model's tensors. Each worker reads those of the layers
that it builds.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_core.job.spec import InitialSpec
from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.url import parse_url
from bamboo_core.text import count
from bamboo_trainer.checkpoint.layer_file import ExportError, StateEntry
from bamboo_trainer.checkpoint.sources import (
    OF_MODULE,
    MergedSource,
    StateSource,
    TensorFiles,
    has_tensors,
    open_source,
    read_tensors,
    tensor_files,
)
from bamboo_trainer.frames import DTYPES
from bamboo_trainer.lora import ADAPTER
from bamboo_trainer.models.huggingface_files import MODULE
from bamboo_trainer.split.layers import SplitLayer
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.inspection import Walk, look, values_wanted
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tied_groups
from bamboo_trainer.tasks.user_code import same_bits

FIELD: Final = "task.initialFrom"
MOST_NAMED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTensor:
    """A parameter or a persistent buffer of the model. names: all its names. places: the layers that have it, each with
    its name there.
    """

    names: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTensor:
    """A tensor of the other weights. entries: several where it is stored several times."""

    name: str
    entries: tuple[StateEntry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.entries[0]
        return first.shape[:-1] if first.complex else first.shape

    @property
    def dtype(self) -> torch.dtype:
        first = self.entries[0]
        return DTYPES[first.dtype].to_complex() if first.complex else DTYPES[first.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A match of a tensor of the model with the weights that give its first value. offers: equal ones, where the model
    has one tensor for them.
    """

    wanted: WantedTensor
    offers: tuple[OfferedTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The result of a match. takes: matches. left: names of unused weights. anew: names of the model's tensors without
    a match.
    """

    takes: tuple[Take, ...]
    left: tuple[str, ...]
    anew: tuple[str, ...]

    def in_words(self, shown: str, merged: int = 0) -> list[str]:
        """Describe tensors taken, left and begun anew, each in a sentence. shown: where the weights are. merged: the
        number of adapters.
        """
        adapters = f", {count(merged, 'adapter')} merged into them" if merged else ""
        lines = [f"taken from {shown}: {count(len(self.takes), 'tensor')}{adapters}"]
        lines += [f"left there: {_named(self.left)}"] if self.left else []
        return [*lines, f"begun anew: {_named(self.anew)}"] if self.anew else lines


def match(wanted: Sequence[WantedTensor], offered: Sequence[OfferedTensor], spec: InitialSpec, shown: str) -> Matching:
    """Match the model's tensors with the weights. Adapters keep their own first values where the weights have none.

    Raises TaskError if a tensor has no counterpart and is not dropped, if shapes or types differ, or if a pattern fits
    nothing.
    """

    def is_dropped(name: str) -> bool:
        return any(_fits(pattern, name) for pattern in spec.drop)

    beside = _beside_adapters(wanted, offered)
    left, by_name = list[str](), dict[str, OfferedTensor]()
    for offer in offered:
        if is_dropped(offer.name):
            left.append(offer.name)
            continue
        name = beside.get(offer.name, offer.name)
        if name in by_name:
            raise TaskError(f"{FIELD}: {by_name[name].name} and {offer.name} would both be {name}")
        by_name[name] = offer
    known = {name for one in wanted for name in one.names}
    droppable = {*(offer.name for offer in offered), *known}
    for pattern in spec.drop:
        if not any(_fits(pattern, name) for name in droppable):
            raise TaskError(f"{FIELD}.drop: no tensor fits {pattern!r}")
    if not known & by_name.keys():
        raise TaskError(
            f"{FIELD}: nothing is taken: {shown} has {_named(list(by_name))}, and the model {_named(sorted(known))}; "
            "write a file with the model's names"
        )
    takes, anew, missing = list[Take](), list[str](), list[str]()
    for one in wanted:
        offers = tuple(by_name[name] for name in one.names if name in by_name)
        if offers:
            _check_form(one, offers)
            takes.append(Take(wanted=one, offers=offers))
        elif any(is_dropped(name) or (beside and is_adapters(name)) for name in one.names):
            anew.append(one.names[0])
        else:
            missing.append(one.names[0])
    if strange := [name for name in by_name if name not in known]:
        raise TaskError(
            f"{FIELD}: {shown} has {_named(strange)}, which the model does not have: "
            f"drop: [{strange[0]}] leaves it there"
        )
    if missing:
        raise TaskError(
            f"{FIELD}: {shown} does not have {_named(missing)} of the model: drop: [{missing[0]}] lets it begin anew"
        )
    return Matching(takes=tuple(takes), left=tuple(left), anew=tuple(anew))


def is_adapters(name: str) -> bool:
    """Return whether the tensor is an adapter's."""
    return name.rpartition(".")[2] in ADAPTER


def _beside_adapters(wanted: Sequence[WantedTensor], offered: Sequence[OfferedTensor]) -> dict[str, str]:
    """Return the model's names of weights with adapters, by their names without adapters; empty if the weights have
    adapters, too.
    """
    if any(is_adapters(offer.name) for offer in offered):
        return {}
    names = {name for one in wanted for name in one.names}
    bases = (name.rpartition(".base.") for name in names)
    return {f"{at}.{leaf}": f"{at}{base}{leaf}" for at, base, leaf in bases if base and f"{at}.{ADAPTER[0]}" in names}


def _fits(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern, in which "*" stands for any characters."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _check_form(wanted: WantedTensor, offers: Sequence[OfferedTensor]) -> None:
    """Raise TaskError if an offer has another shape, or another kind of numbers."""
    for offer in offers:
        both_floats = offer.dtype.is_floating_point and wanted.dtype.is_floating_point
        if offer.dtype != wanted.dtype and not both_floats:
            raise TaskError(f"{FIELD}: {offer.name} is of {offer.dtype} there, expected {wanted.dtype}")
        if offer.shape != wanted.shape:
            raise TaskError(
                f"{FIELD}: {offer.name} is {list(offer.shape)} there and {wanted.names[0]} {list(wanted.shape)} in the "
                f"model: drop: [{offer.name}] lets it begin anew"
            )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (", ".join(names[:MOST_NAMED]) or "nothing") + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The opened weights. shown: their place, for messages. adapters: the number of adapters merged into them."""

    source: StateSource
    shown: str
    adapters: int = 0

    def with_merged_adapters(self) -> "Opened":
        """Return the weights with adapters of `bamboo_trainer.lora` merged into them. Raises TaskError."""
        try:
            merged = MergedSource(self.source)
        except (StorageError, ExportError) as error:
            raise TaskError(f"{FIELD}: {error}") from None
        return replace(self, source=merged, adapters=merged.count)

    def offered(self, *, of_module: bool) -> list[OfferedTensor]:
        """Return the tensors of the weights. of_module: by their names in the whole module, where one was split."""
        try:
            entries = self.source.entries()
        except (StorageError, ExportError) as error:
            raise TaskError(f"{FIELD}: {error}") from None
        inner = [OF_MODULE.fullmatch(entry.name) for entry in entries]
        by_name: dict[str, list[StateEntry]] = {}
        for entry, match in zip(entries, inner, strict=True):
            name = match[1] if match and of_module and all(inner) else entry.name
            by_name.setdefault(name, []).append(entry)
        return [_offered(name, found) for name, found in by_name.items()]


def open_weights(spec: InitialSpec) -> Opened:
    """Open the weights. Raises TaskError, in a sentence, if nothing is there or it cannot be read."""
    try:
        url = parse_url(spec.url, f"{FIELD}.url")
        files = _files(Path(url.path)) if url.protocol == "file" else None
    except ValueError as error:
        raise TaskError(f"{FIELD}.url: {error}" if FIELD not in str(error) else str(error)) from None
    if files is not None:
        if spec.step is not None:
            raise TaskError(f"{FIELD}.step: expected only with checkpoints, and {url.shown} has weights")
        return Opened(source=files, shown=url.shown)
    try:
        if spec.step is None:
            source, _ = open_source(spec.url, None)
            newest = f"the newest one in {url.shown} is of step {source.step}"
            raise TaskError(f"{FIELD}.step: expected the step of a checkpoint; {newest}")
        source, _ = open_source(spec.url, spec.step)
    except (StorageError, ExportError) as error:
        raise TaskError(f"{FIELD}: {error}") from None
    return Opened(source=source, shown=f"the checkpoint of step {spec.step} in {url.shown}")


def _files(path: Path) -> TensorFiles | None:
    """Return files of weights; None for checkpoints or unknown content. Raises ValueError if nothing is there."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    found = tensor_files(path)
    if found is None and has_tensors(path / "weights"):
        raise ValueError(f"expected a folder of weights, such as {path / 'weights'}, got {path}")
    return found


def _offered(name: str, entries: Sequence[StateEntry]) -> OfferedTensor:
    """Return the entries as one tensor. Raises TaskError if their forms differ."""
    if len({(entry.shape, entry.dtype, entry.complex) for entry in entries}) > 1:
        raise TaskError(f"{FIELD}: {' and '.join(entry.name for entry in entries[:2])} would both be {name}")
    return OfferedTensor(name=name, entries=tuple(entries))


logger = logging.getLogger(__name__)


class FirstTask:
    """The task with its initial weights. The first call of `get` opens the weights, and reports what the task takes."""

    def __init__(self, spec: InitialSpec | None, task: Task, report: Callable[[str], None]) -> None:
        self._spec, self._plain, self._report = spec, task, report
        self._made: Task | None = None

    def get(self) -> Task:
        """Return the task. Raises TaskError if the weights do not fit the model."""
        if self._spec is None:
            return self._plain
        if self._made is None:
            self._made, lines = begin_with(self._spec, self._plain)
            for line in lines:
                logger.info("%s", line)
            self._report("; ".join(lines))
        return self._made


def begin_with(spec: InitialSpec, task: Task) -> tuple[Task, list[str]]:
    """Return the task whose layers have the weights as first values, and sentences on tensors taken, left and
    initialized as usual.

    Raises TaskError.
    """
    layers = look(task, (), _tensors_of)
    split = all(is_split for is_split, _ in layers)
    wanted, opened = _wanted(task, [tensors for _, tensors in layers], split), open_weights(spec)
    if not any(is_adapters(name) for one in wanted for name in one.names):
        opened = opened.with_merged_adapters()
    matching = match(wanted, opened.offered(of_module=split), spec, opened.shown)
    takes = _by_layer(matching)
    factories = [
        partial(_begun, factory, takes[index], opened.source) if index in takes else factory
        for index, factory in enumerate(task.layers)
    ]
    return replace(task, layers=factories), matching.in_words(opened.shown, opened.adapters)


# The model's tensors


def _tensors_of(walk: Walk, index: int, _: object) -> tuple[tuple[bool, list[WantedTensor]], object]:
    """Return whether a layer is a part of a split module, and its tensors by their names there."""
    layer = walk.layer(index)
    names: dict[int, list[str]] = {}
    tensors = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    for name, tensor in layer.state_dict(keep_vars=True).items():
        if id(tensor) in tensors:
            names.setdefault(id(tensor), []).append(name)
    found = [
        WantedTensor(
            names=tuple(own), places=((index, own[0]),), shape=tuple(tensors[known].shape), dtype=tensors[known].dtype
        )
        for known, own in names.items()
    ]
    return (isinstance(layer, SplitLayer), found), ()


def _wanted(task: Task, layers: Sequence[list[WantedTensor]], split: bool) -> list[WantedTensor]:
    """Return the model's tensors; tied parameters are one. split: use the names in the whole module."""
    groups = tied_groups(task)
    together: dict[object, list[WantedTensor]] = {}
    for layer, tensors in enumerate(layers):
        for tensor in tensors:
            group = next((groups[f"{layer}.{n}"][0] for n in tensor.names if f"{layer}.{n}" in groups), None)
            key: object = (layer, tensor.names[0]) if group is None else group
            called = [name.removeprefix(MODULE) if split else f"layers.{layer}.{name}" for name in tensor.names]
            together.setdefault(key, []).append(replace(tensor, names=tuple(called)))
    return [
        replace(
            tied[0],
            names=tuple(dict.fromkeys(name for one in tied for name in one.names)),
            places=tuple(place for one in tied for place in one.places),
        )
        for tied in together.values()
    ]


# Reading


def _by_layer(matching: Matching) -> dict[int, list[tuple[str, Take]]]:
    found: dict[int, list[tuple[str, Take]]] = {}
    for take in matching.takes:
        for layer, name in take.wanted.places:
            found.setdefault(layer, []).append((name, take))
    return found


def _begun(factory: Callable[[], nn.Module], takes: Sequence[tuple[str, Take]], source: StateSource) -> nn.Module:
    """Build a layer, and give it the values of other weights."""
    layer = factory()
    if not values_wanted():
        return layer
    own = layer.state_dict(keep_vars=True)
    try:
        found = read_tensors(source, [entry for _, take in takes for offer in take.offers for entry in offer.entries])
    except StorageError as error:
        raise TaskError(f"{FIELD}: {error}") from None
    with torch.no_grad():
        for name, take in takes:
            value = _value(take, found)
            if own[name].shape != value.shape:
                raise TaskError(f"{FIELD}: {take.offers[0].name} has changed while it was read")
            own[name].copy_(value)
    return layer


def _value(take: Take, found: Mapping[str, Tensor]) -> Tensor:
    """Return the value of a tensor. Raises TaskError if it is stored several times with different values."""
    first, *others = [entry for offer in take.offers for entry in offer.entries]
    for entry in others:
        if not same_bits(found[entry.name], found[first.name]):
            raise TaskError(
                f"{FIELD}: {first.name} and {entry.name} differ, and are one tensor of the model "
                f"({', '.join(take.wanted.names[:2])}): drop one of them"
            )
    return found[first.name]
