"""What a stage's modules have counted or noted in their attributes since they were built, and runs without that.

A worker that takes over has built its layers a moment ago, so a layer whose results depend on its earlier calls gives
others there. Numbers, texts and None are looked at; a generator or a list that a layer keeps is not the same on another
worker anyway, or is not found.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

PLAIN: Final = (int, float, str, type(None))  # and bool
_OWN: Final = frozenset(vars(nn.Module()))  # of every module


class AsBuilt:
    """The plain attributes of modules as they are when this is made."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._first = {
            (layer, path): (module, _plain(module))
            for layer, whole in layers.items()
            for path, module in whole.named_modules()
        }

    def changed(self) -> tuple[str, ...]:
        """What is not as it was built, in words."""
        return tuple(
            f"{name!r} of {type(module).__name__} in layer {layer}"
            for (layer, _), (module, first) in self._first.items()
            for name in _differing(module, first)
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it all is as it was built; afterwards as it is now."""
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
    """The names of attributes that are plain now and differ from the first ones, or were none; those that were plain
    and are something else now are caches, and left out.
    """
    now = _plain(module)
    return [n for n in now if n not in first or type(now[n]) is not type(first[n]) or now[n] != first[n]]


def _set(module: nn.Module, wanted: Mapping[str, Any]) -> None:
    """All plain attributes are to be these."""
    for name in _differing(module, wanted):
        if name in wanted:
            setattr(module, name, wanted[name])
        else:
            delattr(module, name)
    for name in wanted.keys() - vars(module).keys():
        setattr(module, name, wanted[name])
