"""Forms of values in the API: how each is read, and its schema in the CRD.

A field's form is in its type's annotation, or follows from it: see `bamboo_core.job.model`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

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
    """Return a rule that checks a text's form; the API server's message would show only a schema's pattern."""
    return {"rule": f"self.matches(r'^({form.pattern.pattern})$')", "message": f"expected {form.said}"}


@dataclass(frozen=True, slots=True)
class FieldSlot:
    """A field of an object, as a form reads it. required: whether its absence is a problem."""

    fields: Fields
    name: str
    required: bool = False

    def value(self, said: str, fits: Callable[[Any], bool], shown: Callable[[str], str] | None = None) -> Any:
        return self.fields.value(self.name, said, fits, required=self.required, shown=shown)


class FieldForm(Protocol):
    """The form of a field's values. harmless: the value that replaces a missing required one while reading
    continues.
    """

    @property
    def said(self) -> str: ...

    @property
    def harmless(self) -> Any: ...

    def read(self, slot: FieldSlot) -> Any:
        """Return the value; None if it is absent or does not fit, which is noted."""
        ...

    def schema(self) -> Schema:
        """Return the CRD's schema without description, default and rules."""
        ...


def _is_int(value: object) -> bool:
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
    def said(self) -> str:
        return f"an integer >= {self.least}"

    @property
    def harmless(self) -> int:
        return self.least

    def read(self, slot: FieldSlot) -> int | None:
        value = slot.fields.get(slot.name)
        above = _is_int(value) and value > self.most
        said = f"an integer <= {self.most}" if above else self.said
        read: int | None = slot.value(said, lambda v: _is_int(v) and self.least <= v <= self.most)
        return read

    def schema(self) -> Schema:
        return _integers(self.least, self.most)


class Number:
    """A number above 0, at most 1e9."""

    said = "a number > 0 and <= 1e9"
    harmless = 1.0

    def read(self, slot: FieldSlot) -> float | None:
        value = slot.value(self.said, _is_number)
        return None if value is None else float(value)

    def schema(self) -> Schema:
        bounds = {"minimum": 0, "exclusiveMinimum": True, "maximum": MOST_NUMBER}
        return {"type": "number", "format": "double", **bounds}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_NUMBER


@dataclass(frozen=True, slots=True)
class Flag:
    said = "true or false"
    harmless = False

    def read(self, slot: FieldSlot) -> bool | None:
        read: bool | None = slot.value(self.said, lambda v: isinstance(v, bool))
        return read

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A member of the enumeration, by its value."""

    members: type[StrEnum]

    @property
    def said(self) -> str:
        return f"one of {', '.join(self.members)}"

    @property
    def harmless(self) -> StrEnum:
        return next(iter(self.members))

    def read(self, slot: FieldSlot) -> StrEnum | None:
        value = slot.value(self.said, lambda v: isinstance(v, str) and v in list(self.members))
        return None if value is None else self.members(value)

    def schema(self) -> Schema:
        return {"type": "string", "enum": [member.value for member in self.members]}


@dataclass(frozen=True, slots=True)
class TextOf:
    """A text of a pattern. made: converts it. shown: the text to show in place of a wrong value."""

    pattern: TextPattern
    made: Callable[[str], Any] = str
    shown: Callable[[str], str] | None = None

    @property
    def said(self) -> str:
        return self.pattern.said

    @property
    def harmless(self) -> str:
        return ""

    def read(self, slot: FieldSlot) -> Any:
        value = slot.value(self.said, lambda v: isinstance(v, str) and self.pattern.fits(v), self.shown)
        return None if value is None else self.made(value)

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.pattern.most, VALIDATIONS: [_fits(self.pattern)]}


@dataclass(frozen=True, slots=True)
class Integers:
    """A list of 1 to `most` integers from 1 to `highest`. of: what they are. each: one of them, for the CRD."""

    of: str
    each: str
    most: int
    highest: int

    @property
    def said(self) -> str:
        return f"a list of 1 to {self.most} {self.of}"

    @property
    def harmless(self) -> tuple[int, ...]:
        return ()

    def read(self, slot: FieldSlot) -> tuple[int, ...] | None:
        numbers = slot.value(self.said, list_fits(1, self.most))
        for i, number in enumerate(numbers or ()):
            if not _is_int(number) or not 1 <= number <= self.highest:
                told = f"expected an integer from 1 to {self.highest}, got {show(number)}"
                slot.fields.problem(f"{slot.name}[{i}]", told)
        if numbers is None:
            return None
        return tuple(n if _is_int(n) and 1 <= n <= self.highest else self.highest for n in numbers)

    def schema(self) -> Schema:
        items = {**_integers(1, self.highest), "description": self.each}
        list_type = {"x-kubernetes-list-type": "atomic"}
        return {"type": "array", "minItems": 1, "maxItems": self.most, **list_type, "items": items}


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of at most `most` texts of a pattern. of: what they are. each: one of them, for the CRD."""

    pattern: TextPattern
    of: str
    each: str
    most: int

    @property
    def said(self) -> str:
        return f"a list of at most {self.most} {self.of}"

    @property
    def harmless(self) -> tuple[str, ...]:
        return ()

    def read(self, slot: FieldSlot) -> tuple[str, ...] | None:
        texts = slot.value(self.said, list_fits(0, self.most))
        if texts is None:
            return None
        fits = [isinstance(text, str) and self.pattern.fits(text) for text in texts]
        for i, text in enumerate(texts):
            if not fits[i]:
                slot.fields.problem(f"{slot.name}[{i}]", f"expected {self.pattern.said}, got {show(text)}")
        return tuple(text for text, good in zip(texts, fits, strict=True) if good)

    def schema(self) -> Schema:
        items = {**TextOf(self.pattern).schema(), "description": self.each}
        return {"type": "array", "maxItems": self.most, "x-kubernetes-list-type": "atomic", "items": items}


@dataclass(frozen=True, slots=True)
class Quantities:
    """Kubernetes quantities by the names of resources."""

    said = "an object"

    @property
    def harmless(self) -> dict[str, str | int]:
        return {}

    def read(self, slot: FieldSlot) -> dict[str, str | int]:
        child = slot.fields.child(slot.name)
        if len(child.values) > MAX_RESOURCES:
            slot.fields.problem(slot.name, f"expected at most {MAX_RESOURCES} resources")
            return {}
        read: dict[str, str | int] = {}
        child.refuse_unknown([key for key in child.values if isinstance(key, str)])
        for key in filter(lambda k: isinstance(k, str), child.values):
            number = _is_int(child.get(key)) and 0 <= child.get(key) <= MAX_INT64
            if not RESOURCE.fits(key):
                slot.fields.problem(slot.name, f"{RESOURCE_NAMES}, got {show(key)}")
            elif number:
                read[key] = child.get(key)
            elif text := child.text(key, QUANTITY):
                read[key] = text
        return read

    def schema(self) -> Schema:
        quantity = {  # no rule: an API server ignores maxLength here, and refuses what may cost so much
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
    """A free object of JSON values, copied; bounded, because YAML aliases can make a small file vast."""

    said = "an object"

    @property
    def harmless(self) -> dict[str, Any]:
        return {}

    def read(self, slot: FieldSlot) -> dict[str, Any]:
        child = slot.fields.child(slot.name)
        return _TreeCopy(child.problems).copy_object(child.values, child.path, 1)

    def schema(self) -> Schema:
        """A map of anything, and no object whose unknown fields are kept: a rule would not see a key renamed in it."""
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
