"""Datasets described by a manifest, such as {"kind": "tokens", "path": "/data/train", "length": 1024}."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

from bamboo_trainer.data.config_keys import arguments, typed
from bamboo_trainer.data.datasets import (
    HuggingFaceDataset,
    Indexed,
    Mixture,
    NpzDataset,
    Prefetched,
    TextDataset,
    text_bytes,
)
from bamboo_trainer.data.sources import open_sources
from bamboo_trainer.data.token_file import Documents, Tokens
from bamboo_trainer.task import Dataset

MIXTURE: Final = "mixture"

Opener = Callable[..., Dataset]  # its keyword-only parameters are the kind's keys; `where` is the config's own key


def dataset_from(
    config: Mapping[str, Any], where: str = "data", kinds: Mapping[str, Opener] = MappingProxyType({})
) -> Dataset:
    """Return the dataset that a task's config describes; docs/data.md has the kinds and their keys.

    where: the config's own key, for messages. kinds: the functions that open additional kinds, by name. Raises
    ValueError with the key in its text; StorageError of bamboo_core.storage if an object store fails.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a mapping with kind and its keys, got {config!r}")
    known, own = {**_KINDS, **kinds}, dict(config)
    kind = own.pop("kind", None)
    if kind not in known:
        raise ValueError(f"{where}.kind must be one of {', '.join(known)}, got {kind!r}")
    if kind == MIXTURE:
        own["sources"] = _sources(own.get("sources"), where, kinds)
    try:
        readers, ahead = typed("readers", own.pop("readers", 0), int), typed("readAhead", own.pop("readAhead", 0), int)
        if ahead and not readers:
            raise ValueError("readAhead: expected together with readers")
        make = known[kind]
        place = {"where": where} if "where" in signature(make).parameters else {}
        dataset = make(**arguments(make, own, "where"), **place)
        return Prefetched(dataset, readers, ahead or None) if readers else dataset
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _sources(given: Any, where: str, kinds: Mapping[str, Opener]) -> list[tuple[float, Dataset]]:
    """Return the weight and the opened dataset of each source of a mixture. Raises ValueError, StorageError."""
    if not isinstance(given, list | tuple) or not all(isinstance(one, Mapping) for one in given):
        raise ValueError(f"{where}.sources must be a list of mappings, got {given!r}")
    sources = []
    for number, source in enumerate(given):
        here, own = f"{where}.sources[{number}]", dict(source)
        if strange := [key for key in ("readers", "readAhead") if key in own]:
            raise ValueError(f"{here}.{strange[0]}: expected beside sources, for all of them")
        if own.get("kind") == MIXTURE:
            raise ValueError(f"{here}.kind: a mixture cannot be a source of another one; name its sources here")
        sources.append((typed(f"{here}.weight", own.pop("weight", None), float), dataset_from(own, here, kinds)))
    return sources


def _mixture(*, sources: list[tuple[float, Dataset]]) -> Dataset:
    return Mixture(sources)


def open_tokens(*, path: str, length: int, documents: str = Documents.JOINED) -> Tokens:
    """Open files of tokens: the kind "tokens" of `dataset_from`. path: a file, a folder or a URL. length: see
    `Tokens`. documents: see `Documents`. Raises ValueError, and StorageError if an object store fails.
    """
    if documents not in list(Documents):
        raise ValueError(f"documents must be one of {', '.join(Documents)}, got {documents!r}")
    return Tokens(open_sources(path), length, Documents(documents))


def _npz(*, path: str, inputs: str | Sequence[str] = "inputs", targets: str | Sequence[str] = "targets") -> Dataset:
    return NpzDataset(path, _names(inputs), _names(targets))


def _hugging_face(
    *,
    path: str,
    inputs: str | Sequence[str] = "input_ids",
    targets: str | Sequence[str] = (),
    split: str | None = None,
) -> Dataset:
    return HuggingFaceDataset(path, _names(inputs), _names(targets), split=split)


def open_text(*, length: int, path: str = "stdlib") -> TextDataset:
    """Open a text's bytes as tokens: the kind "text" of `dataset_from`. path: see `text_bytes`. Raises ValueError."""
    return TextDataset(text_bytes(path), length)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _own(
    *,
    entrypoint: str,
    config: Mapping[str, Any] = MappingProxyType({}),
    inputs: str | Sequence[str] = (),
    targets: str | Sequence[str] = (),
) -> Dataset:
    """Call a user's function with `config`, and return its dataset; samples without a method `batch` make an `Indexed`.

    entrypoint: "module:function". Raises ValueError if this is not a function, or if it returns neither.
    """
    module, colon, function = entrypoint.partition(":")
    if not module or not colon or not function:
        raise ValueError(f'entrypoint must be "module:function", got {entrypoint!r}')
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"entrypoint: cannot import {module!r}: {error}") from error
    if not callable(make):
        raise ValueError(f"entrypoint: {module} has no function {function!r}")
    made = make(config)
    if hasattr(made, "batch"):
        return made  # type: ignore[no-any-return]
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        kind = type(made).__name__
        raise ValueError(f"entrypoint: {entrypoint} returned {kind}, expected samples with a length and [i]")
    return Indexed(made, _names(inputs), _names(targets))


_KINDS: Final[Mapping[str, Opener]] = {
    "tokens": open_tokens,
    "text": open_text,
    "npz": _npz,
    "huggingface": _hugging_face,
    "own": _own,
    MIXTURE: _mixture,
}
