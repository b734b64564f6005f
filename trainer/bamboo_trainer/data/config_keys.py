"""Conversion of a manifest's config, with camelCase keys, into checked keyword arguments of a function or dataclass."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from bamboo_core.text import suggestion


def arguments(make: Callable[..., Any], config: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return a config's values as the keyword arguments of a function or a dataclass.

    Each keyword-only parameter that is not in `without` has a key: maxSteps for max_steps. Its annotation gives the
    type of the value; see `typed`. The key of a parameter without a default is required. Raises ValueError, naming the
    key, if a key is unknown or missing, or a value is invalid.
    """
    hints = get_type_hints(make.func if isinstance(make, partial) else make)
    known = {
        camel(name): parameter
        for name, parameter in signature(make).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and name not in without
    }
    require_known(config, known)
    for key, parameter in known.items():
        if key not in config and parameter.default is Parameter.empty:
            raise ValueError(f"{key} is missing")
    return {known[key].name: typed(key, value, hints[known[key].name]) for key, value in config.items()}


def require_known(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError, with a suggestion, for the first key of a config that is not in `known`."""
    for key in config:
        if key not in known:
            raise ValueError(f"unknown key {key!r}, {suggestion(key, list(known))}")


def camel(name: str) -> str:
    """Return a parameter's key: maxSteps for max_steps."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def typed(key: str, value: Any, hint: Any) -> Any:
    """Check a config's value against a type hint, and return the value. hint: str, int, float, bool, Mapping,
    Sequence (of strings), list, None, a Literal of strings, or a union of these.

    For float, a whole number is converted; True and False are not numbers. Raises ValueError, naming the key and what
    was expected.
    """
    kinds, choices = _kinds(hint), _choices(hint)
    for kind in kinds:
        if value in choices if kind is Literal else _FORMS[kind][1](value):
            return float(value) if kind is float else value
    expected = (f"one of {', '.join(choices)}" if kind is Literal else _FORMS[kind][0] for kind in kinds)
    raise ValueError(f"{key} must be {' or '.join(expected)}, got {value!r}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a type hint allows, with unions flattened and type arguments dropped. A Literal hint gives
    `Literal`.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return tuple(dict.fromkeys(kind for part in get_args(hint) for kind in _kinds(part)))
    return (origin or hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the strings that the Literals in a type hint allow."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in _choices(part))


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


_FORMS: Final[Mapping[Any, tuple[str, Callable[[Any], bool]]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a finite number", _is_finite),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
    Sequence: ("a list of texts", lambda v: isinstance(v, list | tuple) and all(isinstance(one, str) for one in v)),
    list: ("a list", lambda value: isinstance(value, list)),
    NoneType: ("null", lambda value: value is None),
}
