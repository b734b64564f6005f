"""Manifests."""

from copy import deepcopy
from typing import Any

from manifest_kit import minimal

ABSENT = object()


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The minimal manifest with values set at dotted paths."""
    document = minimal()
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = document
        for name in parents:
            at = at.setdefault(name, {})
        if value is ABSENT:
            del at[last]
        else:
            at[last] = deepcopy(value)
    return document
