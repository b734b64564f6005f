"""Reads a raw document field by field, and notes each problem with its path, so that one run tells all mistakes."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from bamboo.job.text_patterns import QUANTITY, RESOURCE, TextPattern

MAX_INT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_TREE_VALUES, MAX_TREE_DEPTH, MAX_TREE_TEXT = 10_000, 16, 65_536
MAX_SUGGESTIONS = 20  # per object; a hostile document must not buy a quadratic search

E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """because: the path of another field that would have to be there, if it is only for want of that one."""

    path: str
    message: str
    because: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class UnknownField(Problem):
    """A field that its object does not have. near: the object's field that was probably meant; known: all of them."""

    key: str
    near: str
    known: tuple[str, ...]


class ManifestError(ValueError):
    """A manifest that cannot be used; its text has one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def show(value: object) -> str:
    """A value in a sentence: JSON, on one line, shortened."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= 60 else json.dumps(value[:57] + "...")
    return json.dumps(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def join(path: str, name: str) -> str:
    """The path of a field, as problems have it."""
    if not re.fullmatch(r"[-\w./]{1,80}(\[\d+\])?", name, re.ASCII):
        return f"{path}[{show(name)}]"
    return f"{path}.{name}" if path else name


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True)
class Fields:
    """Reads one object. A wrong field is noted once and reading goes on with a harmless value."""

    values: Mapping[Any, Any]
    path: str
    problems: list[Problem]
    known: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            self.problem("", f"expected an object, got {show(self.values)}")
            self.values, self.problems = {}, []  # what is missing inside is not worth a word

    def at(self, name: str) -> str:
        if not name:
            return self.path or "manifest"
        return join(self.path, name)

    def problem(self, name: str, message: str, because: str = "") -> None:
        self.problems.append(Problem(self.at(name), message, because=because))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def has(self, name: str) -> bool:
        self.known.append(name)
        return self.get(name) is not None

    def close(self) -> None:
        """Notes what nobody asked for."""
        suggestions = MAX_SUGGESTIONS
        for key in self.values:
            if not isinstance(key, str):
                self.problem("", f"expected field names to be strings, got {show(key)}")
            elif key not in self.known:
                suggestions -= 1
                near = get_close_matches(key, self.known, n=1) if suggestions >= 0 and len(key) <= 80 else []
                said = f"unknown field{f', did you mean {near[0]}?' if near else ''}"
                self.problems.append(UnknownField(self.at(key), said, key, "".join(near), tuple(self.known)))

    def closed(self, value: T) -> T:
        self.close()
        return value

    def _read(
        self,
        name: str,
        said: str,
        fits: Callable[[Any], bool],
        *,
        required: bool = False,
        shown: Callable[[str], str] | None = None,
    ) -> Any:
        value = self.get(name) if self.has(name) else None
        if value is None and required:
            self.problem(name, f"required, expected {said}")
        elif value is not None and not fits(value):
            self.problem(
                name, f"expected {said}, got {show(shown(value) if shown and isinstance(value, str) else value)}"
            )
            return None
        return value

    def _integer(self, name: str, low: int, high: int, required: bool) -> int | None:
        value = self.get(name)
        said = f"an integer <= {high}" if _is_int(value) and value > high else f"an integer >= {low}"
        read: int | None = self._read(name, said, lambda v: _is_int(v) and low <= v <= high, required=required)
        return read

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        """Without a default the field is required."""
        value = self._integer(name, low, high, default is None)
        return value if value is not None else low if default is None else default

    def optional_integer(self, name: str, *, low: int = 1, high: int = MAX_INT) -> int | None:
        return self._integer(name, low, high, False)

    def integer_or(self, name: str, word: str, *, high: int) -> int | None:
        """An integer from 1 to `high`; None for that word, or if the field is absent."""
        value = self.get(name)
        above = _is_int(value) and value > high
        said = f"{word} or an integer {f'<= {high}' if above else '>= 1'}"
        read = self._read(name, said, lambda v: v == word or (_is_int(v) and 1 <= v <= high))
        return None if read == word else read

    def optional_positive(self, name: str) -> float | None:
        def fits(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e9

        value = self._read(name, "a number > 0 and <= 1e9", fits)
        return None if value is None else float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._read(name, "true or false", lambda v: isinstance(v, bool))
        return default if value is None else bool(value)

    def optional_text(
        self, name: str, form: TextPattern, *, required: bool = False, shown: Callable[[str], str] | None = None
    ) -> str | None:
        """shown: what is said of a value that does not fit; it may hold a secret."""

        def fits(value: object) -> bool:
            return isinstance(value, str) and form.fits(value)

        read: str | None = self._read(name, form.said, fits, required=required, shown=shown)
        return read

    def text(self, name: str, form: TextPattern) -> str:
        return self.optional_text(name, form, required=True) or ""

    def choice(self, name: str, default: E, *, required: bool = False) -> E:
        members = {str(member): member for member in type(default)}
        said = f"one of {', '.join(members)}"
        value = self._read(name, said, lambda v: isinstance(v, str) and v in members, required=required)
        return default if value is None else members[value]

    def child(self, name: str) -> "Fields":
        """An absent object reads as an empty one."""
        return Fields(self.get(name) if self.has(name) else {}, self.at(name), self.problems)

    def items(self, name: str, build: Callable[["Fields"], T], *, most: int) -> tuple[T, ...]:
        fits = self._read(name, f"a list of at most {most} objects", _list_fits(0, most)) or ()
        return tuple(build(Fields(v, f"{self.at(name)}[{i}]", self.problems)) for i, v in enumerate(fits))

    def exit_codes(self, name: str) -> tuple[int, ...]:
        if not self.has(name):
            self.problem(name, "required, expected a list of 1 to 64 exit codes")
        return self.integers(name, "exit codes", most=64, high=255)

    def integers(self, name: str, said: str, *, most: int = 1024, high: int) -> tuple[int, ...]:
        """A list of 1 to `most` integers from 1 to `high`. said: what they are."""
        numbers = list(self._read(name, f"a list of 1 to {most} {said}", _list_fits(1, most)) or ())
        for i, number in enumerate(numbers):
            if not _is_int(number) or not 1 <= number <= high:
                self.problem(f"{name}[{i}]", f"expected an integer from 1 to {high}, got {show(number)}")
                numbers[i] = high
        return tuple(numbers)

    def quantities(self, name: str) -> dict[str, str | int]:
        """Kubernetes quantities by resource name."""
        child = self.child(name)
        if len(child.values) > 32:
            self.problem(name, "expected at most 32 resources")
            return {}
        read: dict[str, str | int] = {}
        for key in filter(lambda k: isinstance(k, str), child.values):
            number = _is_int(child.get(key)) and 0 <= child.get(key) <= MAX_INT64
            if not RESOURCE.fits(key):
                self.problem(name, f"{RESOURCE_NAMES}, got {show(key)}{_meant(key)}")
                child.known.append(key)
            elif number:
                read[key] = child.get(key)
            elif text := child.text(key, QUANTITY):
                read[key] = text
            child.known.append(key)
        child.close()
        return read

    def tree(self, name: str) -> dict[str, Any]:
        """A free object of JSON values, copied; bounded, because YAML aliases can make a small file vast."""
        child = self.child(name)
        return _Tree(child.problems).copy_object(child.values, child.path, 1)


RESOURCE_NAMES = (
    "expected resource names such as nvidia.com/gpu (without a domain there are only cpu, memory, ephemeral-storage "
    "and hugepages-SIZE)"
)


def _meant(name: str) -> str:
    """What a name that is none was meant to be, if it looks like one."""
    lower = name.lower()
    if "gpu" in lower or "nvidia" in lower:
        return f", did you mean {'amd' if 'amd' in lower else 'nvidia'}.com/gpu?"
    near = get_close_matches(lower[:80], ("cpu", "memory", "ephemeral-storage"), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else ""


def _list_fits(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and least <= len(value) <= most


@dataclass(slots=True)
class _Tree:
    problems: list[Problem]
    left: int = MAX_TREE_VALUES

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
            return (
                self._refuse(path, f"too large, expected at most {MAX_TREE_VALUES} values") if self.left == -1 else None
            )
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
