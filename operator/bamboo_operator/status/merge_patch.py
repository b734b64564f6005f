"""JSON merge patches (RFC 7396) of a status: they remove what is not there any more, however deep it was."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def merge_patch(new: Json, before: Json) -> dict[str, Any]:
    """Makes `new` of any object that has none but the fields of `before`, of whatever values; neither has a None."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - new.keys())
    for key, value in new.items():
        there = before.get(key)
        patch[key] = merge_patch(value, there) if isinstance(value, Mapping) and isinstance(there, Mapping) else value
    return patch


def either(one: Json, other: Json) -> dict[str, Any]:
    """An object with the fields of both, for one of which it is not known whether it was written."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = either(one[key], other[key])
        elif isinstance(one[key], Mapping):
            both[key] = one[key]
    return both
