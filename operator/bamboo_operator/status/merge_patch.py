"""JSON merge patches (RFC 7396) of a status, which also remove the fields, at any depth, that the new status lacks."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def merge_patch(new: Json, before: Json) -> dict[str, Any]:
    """Return the JSON merge patch that turns `before`, or an object with other values or fewer fields, into `new`.
    Neither `before` nor `new` may contain None.
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - new.keys())
    for key, value in new.items():
        old = before.get(key)
        patch[key] = merge_patch(value, old) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return patch


def either(one: Json, other: Json) -> dict[str, Any]:
    """Return an object with the fields of both: the `before` of a patch if the server may hold either of them."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = either(one[key], other[key])
        elif isinstance(one[key], Mapping):
            both[key] = one[key]
    return both
