"""Datasets described by a manifest, such as {"kind": "tokens", "path": "/data/train", "length": 1024}."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bamboo_core.text import suggestion
from bamboo_trainer.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SUFFIXES,
    HuggingFaceDataset,
    ImageFolder,
    ImageOptions,
    Indexed,
    Mixture,
    NpzDataset,
    Prefetched,
    TextDataset,
    text_bytes,
)
from bamboo_trainer.data.sources import CacheConfig, open_sources
from bamboo_trainer.data.token_file import SUFFIX, Documents, Tokens
from bamboo_trainer.task import Dataset

MIXTURE: Final = "mixture"
_MISSING: Final[Any] = object()


Opener = Callable[[Mapping[str, Any], str], Dataset]  # of the other keys, and of their place, for messages


def dataset_from(
    config: Mapping[str, Any], where: str = "data", kinds: Mapping[str, Opener] = MappingProxyType({})
) -> Dataset:
    """Return the dataset that a task's config describes; docs/data.md has the kinds and their keys.

    where: the config's own key, for messages. kinds: additional kinds. Raises ValueError naming the key and what was
    expected; StorageError of bamboo_core.storage if an object store does not answer.
    """
    keys = _Keys(config, where)
    kind = keys.text("kind")
    if kind in kinds:
        return kinds[kind](keys.rest(), where)
    if kind != MIXTURE and kind not in _KINDS:
        known = ", ".join(dict.fromkeys([*_KINDS, MIXTURE, *kinds]))
        raise ValueError(f"{where}.kind must be one of {known}, got {kind!r}")
    readers, ahead = keys.number("readers", 0), keys.number("readAhead", 0)
    try:
        dataset = _mixture(keys, where, kinds) if kind == MIXTURE else _KINDS[kind](keys)
        keys.finish(kind)
        if not readers:
            if ahead:
                raise ValueError("readAhead: expected together with readers")
            return dataset
        return Prefetched(dataset, readers, ahead or None)
    except KeyProblem:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _mixture(keys: "_Keys", where: str, kinds: Mapping[str, Opener]) -> Mixture:
    sources: list[tuple[float, Dataset]] = []
    for number, source in enumerate(keys.mappings("sources")):
        here = f"{where}.sources[{number}]"
        own = _Keys(source, here)
        weight, rest = own.real("weight"), own.rest()
        for key in ("readers", "readAhead"):
            if key in rest:
                raise KeyProblem(f"{here}.{key}: expected beside sources, for all of them")
        if rest.get("kind") == MIXTURE:
            raise KeyProblem(f"{here}.kind: a mixture cannot be a source of another one; name its sources here")
        sources.append((weight, dataset_from(rest, here, kinds)))
    return Mixture(sources)


class KeyProblem(ValueError):
    """A mistake in one key, which the text names."""


class _Keys:
    """Takes keys out of a mapping, and raises KeyProblem for wrong values."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        if not isinstance(config, Mapping):
            raise KeyProblem(f"{where} must be a mapping with kind and its keys, got {config!r}")
        self._left, self._where = dict(config), where
        self._known: list[str] = []

    def rest(self) -> dict[str, Any]:
        """Return the keys that were not taken, for another reader."""
        left, self._left = self._left, {}
        return left

    def finish(self, kind: str) -> None:
        """Raise KeyProblem if a key is left."""
        for key in self._left:
            raise KeyProblem(f"{self._where}: unknown key {key!r} for kind {kind}, {suggestion(key, self._known)}")

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._take(key, default)
        if not isinstance(value, str) or not (value or value == default):
            raise self._problem(key, "a text", value)
        return value

    def number(self, key: str, default: Any = _MISSING) -> int:
        value = self._take(key, default)
        if type(value) is not int or value < 0:
            raise self._problem(key, "a whole number", value)
        return value

    def real(self, key: str, default: Any = _MISSING) -> float:
        value = self._take(key, default)
        if not _is_finite(value):
            raise self._problem(key, "a finite number", value)
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._problem(key, "true or false", value)
        return value

    def texts(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """Return one or several texts."""
        value = self._take(key, default)
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list | tuple) or not all(isinstance(one, str) and one for one in several):
            raise self._problem(key, "a name or a list of names", value)
        return tuple(several)

    def triple(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        value = self._take(key, default)
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(map(_is_finite, value)):
            raise self._problem(key, "three numbers", value)
        return (float(value[0]), float(value[1]), float(value[2]))

    def mappings(self, key: str) -> Sequence[Mapping[str, Any]]:
        value = self._take(key, _MISSING)
        if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
            raise self._problem(key, "a list of mappings", value)
        return value

    def mapping(self, key: str) -> "Mapping[str, Any]":
        value = self._take(key, {})
        if not isinstance(value, Mapping):
            raise self._problem(key, "a mapping", value)
        return value

    def below(self, key: str) -> "_Keys":
        return _Keys(self.mapping(key), f"{self._where}.{key}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is _MISSING:
            raise KeyProblem(f"{self._where}.{key} is missing")
        return value

    def _problem(self, key: str, expected: str, value: Any) -> KeyProblem:
        return KeyProblem(f"{self._where}.{key} must be {expected}, got {value!r}")


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _cache(keys: _Keys) -> CacheConfig:
    below, default = keys.below("cache"), CacheConfig.default()
    folder = Path(below.text("folder", str(default.folder)))
    gigabytes = below.real("gigabytes", default.bytes / 1e9)
    if gigabytes < 0:
        raise ValueError(f"cache.gigabytes must be at least 0, got {gigabytes:g}")
    below.finish("cache")
    return CacheConfig(folder=folder, bytes=int(gigabytes * 1e9))


def _tokens(keys: _Keys) -> Dataset:
    path, length = keys.text("path"), keys.number("length")
    documents = keys.text("documents", Documents.JOINED.value)
    if documents not in list(Documents):
        raise ValueError(f"documents must be one of {', '.join(Documents)}, got {documents!r}")
    cache = _cache(keys)
    return Tokens(open_sources(path, (SUFFIX,), cache).files, length, Documents(documents))


def _images(keys: _Keys) -> Dataset:
    path, variants, cache = keys.text("path"), keys.number("variants", 1), _cache(keys)
    options = ImageOptions(
        size=keys.number("size", 224),
        augment=keys.truth("augment", False),
        least_area=keys.real("leastArea", 0.08),
        mean=keys.triple("mean", IMAGENET_MEAN),
        std=keys.triple("std", IMAGENET_STD),
    )
    return ImageFolder(open_sources(path, SUFFIXES, cache), options, variants, keys.texts("classes", ()))


def _npz(keys: _Keys) -> Dataset:
    return NpzDataset(keys.text("path"), keys.texts("inputs", ("inputs",)), keys.texts("targets", ("targets",)))


def _hugging_face(keys: _Keys) -> Dataset:
    return HuggingFaceDataset(
        keys.text("path"),
        keys.texts("inputs", ("input_ids",)),
        keys.texts("targets", ()),
        split=keys.text("split", "") or None,
        next_token=keys.truth("nextToken", False),
    )


def _text(keys: _Keys) -> Dataset:
    path, length = keys.text("path", "stdlib"), keys.number("length")
    return TextDataset(text_bytes(path), length)


def _own(keys: _Keys) -> Dataset:
    """Return the dataset of a user's function, which returns a dataset, or samples by number."""
    name, config = keys.text("entrypoint"), keys.mapping("config")
    inputs, targets = keys.texts("inputs", ()), keys.texts("targets", ())
    module, colon, function = name.partition(":")
    if not module or not colon or not function:
        raise ValueError(f'entrypoint must be "module:function", got {name!r}')
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
        raise ValueError(f"entrypoint: {name} returned {type(made).__name__}, expected samples with a length and [i]")
    return Indexed(made, inputs, targets)


_KINDS: Final[Mapping[str, Callable[[_Keys], Dataset]]] = {
    "tokens": _tokens,
    "text": _text,
    "images": _images,
    "npz": _npz,
    "huggingface": _hugging_face,
    "own": _own,
}
