"""A reader of raw documents, field by field, that notes each problem with its path, so that one run finds all
mistakes.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from bamboo_core.job.text_patterns import TextPattern

MAX_INT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_SUGGESTIONS = 20  # per object; bounds the search, which is quadratic, in a hostile document


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ManifestError(ValueError):
    """Error of an unusable manifest; the text has one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def show(value: object) -> str:
    """Format a value for a message: as JSON on one line, shortened; objects, lists and huge integers by their kind."""
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
    """Return the path of a field inside an object, as validation problems show it: `spec.topology.stages`. A name with
    unusual characters is quoted in brackets.
    """
    if not re.fullmatch(r"[-\w./]{1,80}(\[\d+\])?", name, re.ASCII):
        return f"{path}[{show(name)}]"
    return f"{path}.{name}" if path else name


@dataclass(slots=True)
class Fields:
    """Reader of one object. It notes a problem for each wrong field, which then reads as absent.

    places: the paths of fields in the whole document by name, to suggest for an unknown field.
    """

    values: Mapping[Any, Any]
    path: str
    problems: list[Problem]
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            self.problem("", f"expected an object, got {show(self.values)}")
            self.values, self.problems = {}, []  # fields missing in it are not reported

    def at(self, name: str) -> str:
        if not name:
            return self.path or "manifest"
        return join(self.path, name)

    def problem(self, name: str, message: str) -> None:
        self.problems.append(Problem(self.at(name), message))

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Note each field that is not in `known`, with suggestions for a misspelt or misplaced name."""
        suggestions = MAX_SUGGESTIONS
        for key in self.values:
            if not isinstance(key, str):
                self.problem("", f"expected field names to be strings, got {show(key)}")
            elif key not in known:
                suggestions -= 1
                near = get_close_matches(key, known, n=1) if suggestions >= 0 and len(key) <= 80 else []
                meant = " or ".join((*near, *self.places.get(key, ())))
                self.problem(key, f"unknown field{f', did you mean {meant}?' if meant else ''}")

    def value(
        self,
        name: str,
        expected: str,
        fits: Callable[[Any], bool],
        shown: Callable[[str], str] | None = None,
    ) -> Any:
        """Return the field's value; None if it is absent. If it does not fit, note a problem and return None.

        expected: description of a right value. shown: makes a wrong text, which may hold a secret, safe to show.
        """
        value = self.get(name)
        if value is not None and not fits(value):
            self.problem(
                name, f"expected {expected}, got {show(shown(value) if shown and isinstance(value, str) else value)}"
            )
            return None
        return value

    def require(self, name: str, expected: str) -> None:
        """Note the field as missing if it is absent. expected: description of its values."""
        if self.get(name) is None:
            self.problem(name, f"required, expected {expected}")

    def optional_text(self, name: str, form: TextPattern) -> str | None:
        def fits(value: object) -> bool:
            return isinstance(value, str) and form.fits(value)

        read: str | None = self.value(name, form.description, fits)
        return read

    def text(self, name: str, form: TextPattern) -> str:
        self.require(name, form.description)
        return self.optional_text(name, form) or ""

    def child(self, name: str) -> "Fields":
        """Return the reader of an inner object; an absent one reads as empty."""
        value = self.get(name)
        return Fields({} if value is None else value, self.at(name), self.problems, self.places)


def list_fits(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and least <= len(value) <= most


def is_within(path: str, others: Collection[str]) -> bool:
    """Return whether the field at a path is one of `others`, or inside one of them. path, others: paths of fields."""
    return any(path == other or path.startswith(f"{other}.") for other in others)
