"""The plain attributes of a stage's modules as they were built, to run code without the changes of earlier calls.

A worker that takes over has just built its layers, so it gets other results from a layer that depends on its earlier
calls. Only numbers, strings and None are compared: a generator or list kept by a layer is not compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

PLAIN: Final = (int, float, str, type(None))  # and bool
_OWN: Final = frozenset(vars(nn.Module()))  # of every module


class AsBuilt:
    """The plain attributes (numbers, strings, None) that modules had when this object was made. layers: by number."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._first = {
            (layer, path): (module, _plain(module))
            for layer, whole in layers.items()
            for path, module in whole.named_modules()
        }

    def changed(self) -> tuple[str, ...]:
        """Describe each plain attribute that is new, or whose value differs from the one at construction."""
        return tuple(
            f"{name!r} of {type(module).__name__} in layer {layer}"
            for (layer, _), (module, first) in self._first.items()
            for name in _differing(module, first)
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """In this context, give the attributes their values as built; afterwards restore the present values."""
        kept = [(module, {name: vars(module)[name] for name in _plain(module)}) for module, _ in self._first.values()]
        for module, first in self._first.values():
            _set(module, first)
        try:
            yield
        finally:
            for module, now in kept:
                _set(module, now)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {n: value for n, value in vars(module).items() if n not in _OWN and type(value) in (*PLAIN, bool)}


def _differing(module: nn.Module, first: Mapping[str, Any]) -> list[str]:
    """Return the names of plain attributes that are new or changed. An attribute that was plain and now holds another
    kind of object is taken for a cache, and left out.
    """
    now = _plain(module)
    return [n for n in now if n not in first or type(now[n]) is not type(first[n]) or now[n] != first[n]]


def _set(module: nn.Module, wanted: Mapping[str, Any]) -> None:
    """Set a module's plain attributes to these values, and remove its other plain attributes."""
    for name in _differing(module, wanted):
        if name in wanted:
            setattr(module, name, wanted[name])
        else:
            delattr(module, name)
    for name in wanted.keys() - vars(module).keys():
        setattr(module, name, wanted[name])
