"""JSON merge patches (RFC 7396) of a status, which also remove fields that are gone at any depth."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def merge_patch(new: Json, before: Json) -> dict[str, Any]:
    """Return the JSON merge patch that turns any object that has no fields but those of `before` into `new`. Neither
    `before` nor `new` may contain None.
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - new.keys())
    for key, value in new.items():
        old = before.get(key)
        patch[key] = merge_patch(value, old) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return patch


def either(one: Json, other: Json) -> dict[str, Any]:
    """Merge two objects, as the base of a patch when it is unknown which of them was written."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = either(one[key], other[key])
        elif isinstance(one[key], Mapping):
            both[key] = one[key]
    return both
