"""`task.initialFrom`: initialization of a model from a checkpoint or from safetensors files. Each worker reads only the
tensors of the layers that it builds.
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
from bamboo_trainer.checkpoint.layer_file import StateEntry
from bamboo_trainer.checkpoint.sources import (
    StateSource,
    TensorFiles,
    has_tensors,
    open_source,
    read_tensors,
    tensor_files,
    under_module_names,
)
from bamboo_trainer.frames import DTYPES
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
    """A parameter or a persistent buffer of the model. names: all its names in the model; a tied parameter has several.
    places: (number of a layer that has it, its name in that layer), for each such layer.
    """

    names: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A tensor of the model with the stored tensors that initialize it. offers: several if the model ties tensors that
    are stored separately; their values must be equal.
    """

    wanted: WantedTensor
    offers: tuple[StateEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The result of `match`. takes: the model's tensors that are initialized, each with its stored tensors. left: names
    of the weights that are not used. anew: names of the model's tensors that keep their own initialization.
    """

    takes: tuple[Take, ...]
    left: tuple[str, ...]
    anew: tuple[str, ...]

    def in_words(self, shown: str) -> list[str]:
        """Return lines for the user: the number of tensors taken from `shown`, and the names in `left` and `anew`."""
        lines = [f"taken from {shown}: {count(len(self.takes), 'tensor')}"]
        lines += [f"left there: {_named(self.left)}"] if self.left else []
        return [*lines, f"begun anew: {_named(self.anew)}"] if self.anew else lines


def match(wanted: Sequence[WantedTensor], offered: Sequence[StateEntry], spec: InitialSpec, shown: str) -> Matching:
    """Match the model's tensors with the weights by name.

    Raises TaskError if nothing matches, a tensor of either side has no counterpart and is not dropped, a shape or dtype
    does not fit, or a pattern of `drop` fits no tensor. offered: the weights. shown: their place, for messages.
    """

    def is_dropped(name: str) -> bool:
        return any(_fits(pattern, name) for pattern in spec.drop)

    left = tuple(offer.name for offer in offered if is_dropped(offer.name))
    by_name = {offer.name: offer for offer in offered if not is_dropped(offer.name)}
    known = {name for one in wanted for name in one.names}
    for pattern in spec.drop:
        if not any(_fits(pattern, name) for name in (*left, *known)):
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
        elif any(map(is_dropped, one.names)):
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
    return Matching(takes=tuple(takes), left=left, anew=tuple(anew))


def _fits(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern, in which "*" stands for any characters."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _check_form(wanted: WantedTensor, offers: Sequence[StateEntry]) -> None:
    """Raise TaskError if a stored tensor's shape or dtype does not fit. Real floating-point dtypes fit each other."""
    for offer in offers:
        shape = offer.shape[:-1] if offer.complex else offer.shape
        dtype = DTYPES[offer.dtype].to_complex() if offer.complex else DTYPES[offer.dtype]
        if dtype != wanted.dtype and not (dtype.is_floating_point and wanted.dtype.is_floating_point):
            raise TaskError(f"{FIELD}: {offer.name} is of {dtype} there, expected {wanted.dtype}")
        if shape != wanted.shape:
            raise TaskError(
                f"{FIELD}: {offer.name} is {list(shape)} there and {wanted.names[0]} {list(wanted.shape)} in the "
                f"model: drop: [{offer.name}] lets it begin anew"
            )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (", ".join(names[:MOST_NAMED]) or "nothing") + more


def open_weights(spec: InitialSpec, *, of_module: bool) -> tuple[StateSource, Sequence[StateEntry], str]:
    """Open the weights of `task.initialFrom`. Return the weights, their tensors, and their place for messages.

    Raises TaskError, one sentence, if they are missing or cannot be read, or if `step` is given for files of weights or
    missing for checkpoints. of_module: name the tensors as in the whole module that `from_module` split.
    """
    try:
        url = parse_url(spec.url, f"{FIELD}.url")
        files = _files(Path(url.path)) if url.protocol == "file" else None
    except ValueError as error:
        raise TaskError(f"{FIELD}.url: {error}" if FIELD not in str(error) else str(error)) from None
    if files is not None and spec.step is not None:
        raise TaskError(f"{FIELD}.step: expected only with checkpoints, and {url.shown} has weights")
    try:
        source = files or open_source(spec.url, spec.step)[0]
        if files is None and spec.step is None:
            newest = f"the newest one in {url.shown} is of step {source.step}"
            raise TaskError(f"{FIELD}.step: expected the step of a checkpoint; {newest}")
        entries = under_module_names(source, source.entries()) if of_module else source.entries()
    except StorageError as error:
        raise TaskError(f"{FIELD}: {error}") from None
    shown = url.shown if files else f"the checkpoint of step {spec.step} in {url.shown}"
    return source, entries, shown


def _files(path: Path) -> TensorFiles | None:
    """Return the files of weights at a path; None for checkpoints or unknown content. Raises ValueError if the path
    does not exist, the folder's file or index is invalid, or the weights are in its subfolder `weights`.
    """
    if not path.exists():
        raise ValueError(f"there is no {path}")
    found = tensor_files(path)
    if found is None and has_tensors(path / "weights"):
        raise ValueError(f"expected a folder of weights, such as {path / 'weights'}, got {path}")
    return found


logger = logging.getLogger(__name__)


class FirstTask:
    """The task, initialized from the weights of `task.initialFrom` if that field is set. The first call of `get` opens
    the weights, and reports which tensors are taken.
    """

    def __init__(self, spec: InitialSpec | None, task: Task, report: Callable[[str], None]) -> None:
        self._spec, self._plain, self._report = spec, task, report
        self._made: Task | None = None

    def get(self) -> Task:
        """Return the task. Raises TaskError if the weights cannot be read, or do not fit the model."""
        if self._spec is None:
            return self._plain
        if self._made is None:
            self._made, lines = begin_with(self._spec, self._plain)
            for line in lines:
                logger.info("%s", line)
            self._report("; ".join(lines))
        return self._made


def begin_with(spec: InitialSpec, task: Task) -> tuple[Task, list[str]]:
    """Return the task with layers that are initialized from the weights when they are built, and the lines of
    `Matching.in_words`.

    Raises TaskError if the weights cannot be read, or do not fit the model.
    """
    layers = look(task, (), _tensors_of)
    split = all(is_split for is_split, _ in layers)
    wanted = _wanted(task, [tensors for _, tensors in layers], split)
    source, entries, shown = open_weights(spec, of_module=split)
    matching = match(wanted, entries, spec, shown)
    takes: dict[int, list[tuple[str, Take]]] = {}
    for take in matching.takes:
        for layer, name in take.wanted.places:
            takes.setdefault(layer, []).append((name, take))
    factories = [
        partial(_begun, factory, takes[index], source) if index in takes else factory
        for index, factory in enumerate(task.layers)
    ]
    return replace(task, layers=factories), matching.in_words(shown)


# The model's tensors


def _tensors_of(walk: Walk, index: int, _: object) -> tuple[tuple[bool, list[WantedTensor]], object]:
    """Visit a layer for `look`: return whether it is part of a split module, and its tensors under local names."""
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
    """Return the model's tensors; tied parameters count as one tensor. layers: the tensors of each layer. split: use
    the names in the whole module.
    """
    groups = tied_groups(task)
    together: dict[object, list[WantedTensor]] = {}
    for layer, tensors in enumerate(layers):
        for tensor in tensors:
            group = next((groups[f"{layer}.{n}"][0] for n in tensor.names if f"{layer}.{n}" in groups), None)
            key: object = (layer, tensor.names[0]) if group is None else group
            called = [name.removeprefix("module.") if split else f"layers.{layer}.{name}" for name in tensor.names]
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


def _begun(factory: Callable[[], nn.Module], takes: Sequence[tuple[str, Take]], source: StateSource) -> nn.Module:
    """Build a layer, and copy the weights into it unless only shapes are wanted. Raises TaskError if the copy fails."""
    layer = factory()
    if not values_wanted():
        return layer
    own = layer.state_dict(keep_vars=True)
    try:
        found = read_tensors(source, [offer for _, take in takes for offer in take.offers])
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
    """Return a tensor's initial value. Raises TaskError if it is stored several times with different values."""
    first, *others = take.offers
    for entry in others:
        if not same_bits(found[entry.name], found[first.name]):
            raise TaskError(
                f"{FIELD}: {first.name} and {entry.name} differ, and are one tensor of the model "
                f"({', '.join(take.wanted.names[:2])}): drop one of them"
            )
    return found[first.name]
