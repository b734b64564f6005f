"""The match of tensors of other weights with the model's tensors, whose first values they become. Pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from bamboo_core.job.spec import InitialSpec
from bamboo_core.text import count
from bamboo_trainer.checkpoint.state_dict import StateEntry
from bamboo_trainer.frames.tensors import DTYPES
from bamboo_trainer.lora import ADAPTER
from bamboo_trainer.tasks.task_errors import TaskError

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
    """A tensor of the model and its first value. offers: equal ones, where the model has one tensor for them."""

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
        """Describe each of the three in a sentence. shown: where the weights are. merged: the number of adapters."""
        adapters = f", {count(merged, 'adapter')} merged into them" if merged else ""
        lines = [f"taken from {shown}: {count(len(self.takes), 'tensor')}{adapters}"]
        lines += [f"left there: {_named(self.left)}"] if self.left else []
        return [*lines, f"begun anew: {_named(self.anew)}"] if self.anew else lines


def match(wanted: Sequence[WantedTensor], offered: Sequence[OfferedTensor], spec: InitialSpec, shown: str) -> Matching:
    """Match the model's tensors with the weights. Adapters keep their own first values where the weights have none.

    Raises TaskError if a tensor has no counterpart and is not dropped, if shapes or types differ, or if a pattern fits
    nothing.
    """
    beside = _beside_adapters(wanted, offered)
    left, by_name = list[str](), dict[str, OfferedTensor]()
    for offer in offered:
        if _is_dropped(offer.name, spec):
            left.append(offer.name)
            continue
        name = beside.get(offer.name, offer.name)
        if name in by_name:
            raise TaskError(f"{FIELD}: {by_name[name].name} and {offer.name} would both be {name}")
        by_name[name] = offer
    known = {name for one in wanted for name in one.names}
    _check_used(spec.drop, {*(offer.name for offer in offered), *known})
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
        elif any(_is_dropped(name, spec) or (beside and is_adapters(name)) for name in one.names):
            anew.append(one.names[0])
        else:
            missing.append(one.names[0])
    _check_missing(missing, [name for name in by_name if name not in known], shown)
    return Matching(takes=tuple(takes), left=tuple(left), anew=tuple(anew))


def is_adapters(name: str) -> bool:
    """Return whether the tensor is an adapter's."""
    return name.rpartition(".")[2] in ADAPTER


def _beside_adapters(wanted: Sequence[WantedTensor], offered: Sequence[OfferedTensor]) -> dict[str, str]:
    """Return the model's names of weights with adapters, by their names without; empty if the others have adapters."""
    if any(is_adapters(offer.name) for offer in offered):
        return {}
    names = {name for one in wanted for name in one.names}
    bases = (name.rpartition(".base.") for name in names)
    return {f"{at}.{leaf}": f"{at}{base}{leaf}" for at, base, leaf in bases if base and f"{at}.{ADAPTER[0]}" in names}


def _is_dropped(name: str, spec: InitialSpec) -> bool:
    return any(_fits(pattern, name) for pattern in spec.drop)


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


def _check_missing(missing: Sequence[str], strange: Sequence[str], shown: str) -> None:
    if strange:
        raise TaskError(
            f"{FIELD}: {shown} has {_named(strange)}, which the model does not have: "
            f"drop: [{strange[0]}] leaves it there"
        )
    if missing:
        raise TaskError(
            f"{FIELD}: {shown} does not have {_named(missing)} of the model: drop: [{missing[0]}] lets it begin anew"
        )


def _check_used(patterns: Sequence[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(_fits(pattern, name) for name in names):
            raise TaskError(f"{FIELD}.drop: no tensor fits {pattern!r}")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (", ".join(names[:MOST_NAMED]) or "nothing") + more
