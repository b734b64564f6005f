"""Fields that are misspelt or stand at the wrong level: what was probably meant, and what follows from them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bamboo_core.job.fields import Problem, UnknownField

MOST_PLACES = 2  # that are worth naming


def causes_first(
    problems: Sequence[Problem], places: Mapping[str, tuple[str, ...]], document: Mapping[str, Any]
) -> list[Problem]:
    """These problems, but those that others cause are left out; fields whose meaning can be guessed come first.
    places: where fields of each name belong.
    """
    read = [_placed(problem, places) if isinstance(problem, UnknownField) else problem for problem in problems]
    guessed = {p.path: meant for p in read if isinstance(p, UnknownField) and (meant := _meant(p, places))}
    caused = {place for meant in guessed.values() for place in meant if not _is_there(document, place)}
    causes = [p for p in read if p.path in guessed and isinstance(p, UnknownField)]
    return causes + [p for p in read if p not in causes and not _follows(p, caused)]


def _meant(problem: UnknownField, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The paths of the fields that were perhaps meant."""
    above = problem.path.removesuffix(problem.key)
    return (*([f"{above}{problem.near}"] if problem.near else []), *_elsewhere(problem, places))


def _elsewhere(problem: UnknownField, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Those closest to the top."""
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


def _follows(problem: Problem, caused: set[str]) -> bool:
    """Is it only missing because it, the object that it is in, or what makes it needless was written under another
    name?
    """
    missing = problem.message.startswith("required") or problem.message.endswith("got none")
    wanted = [path for path in (problem.path, problem.because) if path]
    return missing and any(path == place or path.startswith(f"{place}.") for path in wanted for place in caused)
