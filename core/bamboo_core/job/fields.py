"""A reader of raw documents, field by field, that notes each problem with its path, so that one run finds all
mistakes.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from bamboo_core.job.text_patterns import TextPattern

MAX_INT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_SUGGESTIONS = 20  # per object; a hostile document must not buy a quadratic search


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class UnknownField(Problem):
    """A field that its object does not have. near: the field that was probably meant; known: all fields."""

    key: str
    near: str
    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MissingField(Problem):
    """A required field that is absent."""


class ManifestError(ValueError):
    """Error of an unusable manifest; the text has one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def show(value: object) -> str:
    """Return a value for a sentence: JSON on one line, shortened."""
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
    """Return the path of a field, as problems have it."""
    if not re.fullmatch(r"[-\w./]{1,80}(\[\d+\])?", name, re.ASCII):
        return f"{path}[{show(name)}]"
    return f"{path}.{name}" if path else name


@dataclass(slots=True)
class Fields:
    """Reader of one object. It notes a wrong field once and continues with a harmless value."""

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

    def problem(self, name: str, message: str) -> None:
        self.problems.append(Problem(self.at(name), message))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def has(self, name: str) -> bool:
        self.known.append(name)
        return self.get(name) is not None

    def close(self) -> None:
        """Note the unread fields as unknown."""
        suggestions = MAX_SUGGESTIONS
        for key in self.values:
            if not isinstance(key, str):
                self.problem("", f"expected field names to be strings, got {show(key)}")
            elif key not in self.known:
                suggestions -= 1
                near = get_close_matches(key, self.known, n=1) if suggestions >= 0 and len(key) <= 80 else []
                said = f"unknown field{f', did you mean {near[0]}?' if near else ''}"
                self.problems.append(UnknownField(self.at(key), said, key, "".join(near), tuple(self.known)))

    def value(
        self,
        name: str,
        said: str,
        fits: Callable[[Any], bool],
        *,
        required: bool = False,
        shown: Callable[[str], str] | None = None,
    ) -> Any:
        """Return the field's value; None if it is absent or does not fit, which is noted.

        said: what is expected. shown: the text to show in place of a wrong value, which may be a secret.
        """
        value = self.get(name) if self.has(name) else None
        if value is None and required:
            self.problems.append(MissingField(self.at(name), f"required, expected {said}"))
        elif value is not None and not fits(value):
            self.problem(
                name, f"expected {said}, got {show(shown(value) if shown and isinstance(value, str) else value)}"
            )
            return None
        return value

    def optional_text(self, name: str, form: TextPattern, *, required: bool = False) -> str | None:
        def fits(value: object) -> bool:
            return isinstance(value, str) and form.fits(value)

        read: str | None = self.value(name, form.said, fits, required=required)
        return read

    def text(self, name: str, form: TextPattern) -> str:
        return self.optional_text(name, form, required=True) or ""

    def child(self, name: str) -> "Fields":
        """Return the reader of an inner object; an absent one reads as empty."""
        return Fields(self.get(name) if self.has(name) else {}, self.at(name), self.problems)


def list_fits(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and least <= len(value) <= most


MOST_PLACES = 2  # that are worth naming


def causes_first(
    problems: Sequence[Problem], places: Mapping[str, tuple[str, ...]], document: Mapping[str, Any]
) -> tuple[list[Problem], set[str]]:
    """Return the problems to report, and the paths of absent fields that an unknown field probably stands for.

    Unknown fields with a likely meaning come first; the absent fields that they stand for are left out. places: the
    paths of the fields of each name.
    """
    read = [_placed(problem, places) if isinstance(problem, UnknownField) else problem for problem in problems]
    guessed = {p.path: meant for p in read if isinstance(p, UnknownField) and (meant := _meant(p, places))}
    absent = {place for meant in guessed.values() for place in meant if not _is_there(document, place)}
    causes = [p for p in read if p.path in guessed and isinstance(p, UnknownField)]
    others = [p for p in read if p not in causes and not (isinstance(p, MissingField) and is_within(p.path, absent))]
    return causes + others, absent


def is_within(path: str, others: Collection[str]) -> bool:
    """Return whether a field is one of the others, or in one of them."""
    return any(path == other or path.startswith(f"{other}.") for other in others)


def _meant(problem: UnknownField, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the paths of the fields that were perhaps meant."""
    above = problem.path.removesuffix(problem.key)
    return (*([f"{above}{problem.near}"] if problem.near else []), *_elsewhere(problem, places))


def _elsewhere(problem: UnknownField, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the paths closest to the top."""
    found = sorted(places.get(problem.key, ()), key=lambda path: path.count("."))
    return tuple(path for path in found if path.count(".") == found[0].count("."))[:MOST_PLACES]


def _placed(problem: UnknownField, places: Mapping[str, tuple[str, ...]]) -> UnknownField:
    elsewhere = _elsewhere(problem, places)
    if not elsewhere:
        return problem
    said = " or ".join([*([problem.near] if problem.near else []), *elsewhere])
    return replace(problem, message=f"unknown field, did you mean {said}?")


def _is_there(document: Mapping[str, Any], path: str) -> bool:
    found: Any = document
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found is not None
