"""Fields that are misspelt or at the wrong level: what was probably meant, and which problems follow. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bamboo_core.job.fields import MissingField, Problem, UnknownField

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
