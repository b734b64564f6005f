"""Parser of a task's config into the values of a dataclass: every key known, every value of its type."""

from collections.abc import Collection, Mapping
from typing import Any

from bamboo_core.text import suggestion


def typed_values(
    config: Mapping[str, Any], keys: Mapping[str, tuple[str, Any]], *, nullable: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values by the names of fields. keys: for each key its field, and the type or types of its values.

    A whole number is accepted as a float; True and False are not numbers. nullable: keys that may also be null. Raises
    ValueError, naming the key and what was expected.
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key not in keys:
            raise ValueError(f"unknown key {key!r}, {suggestion(key, list(keys))}")
        field, kind = keys[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int:
            value = float(value)
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits and not (value is None and key in nullable):
            names = " or ".join(k.__name__ for k in kinds)
            raise ValueError(f"{key} must be of type {names}, got {value!r}")
        values[field] = value
    return values
