"""Forms of values in the API. A form reads a value from a manifest, and gives its schema in the CRD.

A field's annotation gives its form, unless the field's type implies it: see `bamboo_core.job.model`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeGuard

from bamboo_core.job.fields import MAX_INT, MAX_INT64, Fields, Problem, join, list_fits, show
from bamboo_core.job.text_patterns import QUANTITY, RESOURCE, TextPattern

MAX_TREE_VALUES, MAX_TREE_DEPTH, MAX_TREE_TEXT = 10_000, 16, 65_536
MAX_RESOURCES = 32
MOST_NUMBER = 1_000_000_000
RESOURCE_NAMES = (
    "expected resource names such as nvidia.com/gpu (without a domain there are only cpu, memory, ephemeral-storage "
    "and hugepages-SIZE)"
)

Schema = dict[str, Any]
ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}
VALIDATIONS = "x-kubernetes-validations"


def _fits(form: TextPattern) -> Schema:
    """Return a CEL rule that matches a text with a pattern, and has a message that describes the form. For a `pattern`
    in the schema, the API server's message would show only the pattern.
    """
    return {"rule": f"self.matches(r'^({form.pattern.pattern})$')", "message": f"expected {form.description}"}


class FieldForm(Protocol):
    """The form of a field's values.

    description: of a right value, for messages. harmless: replaces a wrong or missing value of a field without a
    default, so that reading can continue.
    """

    @property
    def description(self) -> str: ...

    @property
    def harmless(self) -> Any: ...

    def read(self, fields: Fields, name: str) -> Any:
        """Return the value without wrong items; None (maps: empty) if it is absent or wrong. Note each problem."""
        ...

    def schema(self) -> Schema:
        """Return the CRD's schema of a value, without the field's description and default."""
        ...


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(least: int, most: int) -> Schema:
    if most == MAX_INT64:
        return {"type": "integer", "format": "int64", "minimum": least}
    return {"type": "integer", "format": "int32", "minimum": least, "maximum": most}


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer from `least` to `most`."""

    least: int = 1
    most: int = MAX_INT

    @property
    def description(self) -> str:
        return f"an integer >= {self.least}"

    @property
    def harmless(self) -> int:
        return self.least

    def fits(self, value: object) -> bool:
        return _is_int(value) and self.least <= value <= self.most

    def expected(self, value: object) -> str:
        """Return the description of a right value, for a message about a wrong one."""
        return f"an integer <= {self.most}" if _is_int(value) and value > self.most else self.description

    def read(self, fields: Fields, name: str) -> int | None:
        read: int | None = fields.value(name, self.expected(fields.get(name)), self.fits)
        return read

    def schema(self) -> Schema:
        return _integers(self.least, self.most)


class Number:
    """A number above 0, at most 1e9."""

    description = "a number > 0 and <= 1e9"
    harmless = 1.0

    def read(self, fields: Fields, name: str) -> float | None:
        value = fields.value(name, self.description, _is_number)
        return None if value is None else float(value)

    def schema(self) -> Schema:
        bounds = {"minimum": 0, "exclusiveMinimum": True, "maximum": MOST_NUMBER}
        return {"type": "number", "format": "double", **bounds}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_NUMBER


@dataclass(frozen=True, slots=True)
class Flag:
    description = "true or false"
    harmless = False

    def read(self, fields: Fields, name: str) -> bool | None:
        read: bool | None = fields.value(name, self.description, lambda v: isinstance(v, bool))
        return read

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class OneOf:
    """The value of a member of an enumeration; it is read as the member."""

    members: type[StrEnum]

    @property
    def description(self) -> str:
        return f"one of {', '.join(self.members)}"

    @property
    def harmless(self) -> StrEnum:
        return next(iter(self.members))

    def read(self, fields: Fields, name: str) -> StrEnum | None:
        value = fields.value(name, self.description, lambda v: isinstance(v, str) and v in list(self.members))
        return None if value is None else self.members(value)

    def schema(self) -> Schema:
        return {"type": "string", "enum": [member.value for member in self.members]}


@dataclass(frozen=True, slots=True)
class TextOf:
    """A text that matches a pattern. made: converts the text. shown: makes a wrong text safe to show in messages."""

    pattern: TextPattern
    made: Callable[[str], Any] = str
    shown: Callable[[str], str] | None = None

    @property
    def description(self) -> str:
        return self.pattern.description

    @property
    def harmless(self) -> str:
        return ""

    def fits(self, value: object) -> bool:
        return isinstance(value, str) and self.pattern.fits(value)

    def expected(self, value: object) -> str:
        return self.description

    def read(self, fields: Fields, name: str) -> Any:
        value = fields.value(name, self.description, self.fits, self.shown)
        return None if value is None else self.made(value)

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.pattern.most, VALIDATIONS: [_fits(self.pattern)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list of `least` to `most` values of one form. of: the values' name in messages. each: the description of one
    value, for the CRD.
    """

    form: Integer | TextOf
    of: str
    each: str
    least: int = 0
    most: int

    @property
    def description(self) -> str:
        return f"a list of {f'{self.least} to' if self.least else 'at most'} {self.most} {self.of}"

    @property
    def harmless(self) -> tuple[Any, ...]:
        return ()

    def read(self, fields: Fields, name: str) -> tuple[Any, ...] | None:
        """Return the values that fit; None if the field is absent or not a list of a permitted length. Note each
        problem.
        """
        values = fields.value(name, self.description, list_fits(self.least, self.most))
        if values is None:
            return None
        for i, value in enumerate(values):
            if not self.form.fits(value):
                fields.problem(f"{name}[{i}]", f"expected {self.form.expected(value)}, got {show(value)}")
        return tuple(filter(self.form.fits, values))

    def schema(self) -> Schema:
        return {
            "type": "array",
            **({"minItems": self.least} if self.least else {}),
            "maxItems": self.most,
            "x-kubernetes-list-type": "atomic",
            "items": {**self.form.schema(), "description": self.each},
        }


@dataclass(frozen=True, slots=True)
class Quantities:
    """Kubernetes quantities by the names of resources."""

    description = "an object"

    @property
    def harmless(self) -> dict[str, str | int]:
        return {}

    def read(self, fields: Fields, name: str) -> dict[str, str | int]:
        child = fields.child(name)
        if len(child.values) > MAX_RESOURCES:
            fields.problem(name, f"expected at most {MAX_RESOURCES} resources")
            return {}
        read: dict[str, str | int] = {}
        child.refuse_unknown([key for key in child.values if isinstance(key, str)])
        for key in filter(lambda k: isinstance(k, str), child.values):
            number = _is_int(child.get(key)) and 0 <= child.get(key) <= MAX_INT64
            if not RESOURCE.fits(key):
                fields.problem(name, f"{RESOURCE_NAMES}, got {show(key)}")
            elif number:
                read[key] = child.get(key)
            elif text := child.text(key, QUANTITY):
                read[key] = text
        return read

    def schema(self) -> Schema:
        quantity = {  # no rule: an API server ignores maxLength here, and would refuse the rule for its cost
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": QUANTITY.most,
            "pattern": f"^{QUANTITY.pattern.pattern}$",
            "description": "A Kubernetes quantity, such as 1, 500m or 16Gi.",
        }
        names = {
            "rule": f"self.all(n, size(n) <= {RESOURCE.most} && n.matches('^({RESOURCE.pattern.pattern})$'))",
            "message": RESOURCE_NAMES,
        }
        return {
            "type": "object",
            "maxProperties": MAX_RESOURCES,
            "additionalProperties": quantity,
            VALIDATIONS: [names],
        }


@dataclass(frozen=True, slots=True)
class Tree:
    """An object of any JSON values, copied on reading; bounded, because YAML aliases can make a small file vast."""

    description = "an object"

    @property
    def harmless(self) -> dict[str, Any]:
        return {}

    def read(self, fields: Fields, name: str) -> dict[str, Any]:
        child = fields.child(name)
        return _TreeCopy(child.problems).copy_object(child.values, child.path, 1)

    def schema(self) -> Schema:
        """Return the schema of a map with any values. It is not an object that preserves unknown fields, because the
        CRD's rules would not notice a renamed key in it.
        """
        return {"type": "object", "maxProperties": MAX_TREE_VALUES, "additionalProperties": dict(ANYTHING)}


@dataclass(slots=True)
class _TreeCopy:
    problems: list[Problem]
    left: int = field(default=MAX_TREE_VALUES)

    def copy_object(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        copied = {}
        for key, inner in value.items():
            if self.left < 0:
                break
            if not isinstance(key, str) or len(key) > 253:
                self._refuse(path, f"expected field names to be strings of at most 253 characters, got {show(key)}")
            else:
                copied[key] = self.copy(inner, join(path, key), depth)
        return copied

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            too_large = f"too large, expected at most {MAX_TREE_VALUES} values"
            return self._refuse(path, too_large) if self.left == -1 else None
        if isinstance(value, Mapping | list | tuple) and depth >= MAX_TREE_DEPTH:
            return self._refuse(path, f"nested too deeply, expected at most {MAX_TREE_DEPTH} levels")
        if isinstance(value, Mapping):
            return self.copy_object(value, path, depth + 1)
        if isinstance(value, list | tuple):
            return [self.copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value) if self.left >= 0]
        if isinstance(value, str) and len(value) > MAX_TREE_TEXT:
            return self._refuse(path, f"expected at most {MAX_TREE_TEXT} characters, got {len(value)}")
        if _is_int(value) and not -MAX_INT64 <= value <= MAX_INT64:
            return self._refuse(path, f"expected an integer of 64 bits, got {show(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(path, f"expected a finite number, got {value}")
        if value is not None and not isinstance(value, str | int | float):
            return self._refuse(path, f"expected a JSON value, got {show(value)}")
        return value

    def _refuse(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))
