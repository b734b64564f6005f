"""A sum of numbers without rounding, as few numbers that are sent instead of all.

`math.fsum` of the terms of several such sums is the exactly rounded sum of all their numbers, so it does not depend on
how they were divided. After Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997 (grow-expansion).
"""

import math
from collections.abc import Iterable, Mapping, Sequence


def exact_terms(numbers: Iterable[float]) -> list[float]:
    """At most 40 or so terms, whose sum is exactly that of the numbers. One that is not finite is the only term."""
    terms: list[float] = []
    for number in numbers:
        if not math.isfinite(number):
            return [number]
        rest, kept = number, []
        for term in terms:
            rest, error = _two_sum(rest, term)
            if error:
                kept.append(error)
        terms = [*kept, rest] if rest else kept
    return terms


def exact_sums(
    measured: Iterable[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[list[float], list[float]]]:
    """By name, of all sums and of all their weights."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in measured:
        for name, pair in one.items():
            found.setdefault(name, []).append(pair)
    return {
        name: (exact_terms(total for total, _ in pairs), exact_terms(weight for _, weight in pairs))
        for name, pairs in sorted(found.items())
    }


def quotient(total: Sequence[float], weight: Sequence[float]) -> float:
    """The quotient of the exactly rounded sums of these terms; NaN if one of them is no finite number, or the weight is
    0.
    """
    if not all(map(math.isfinite, (*total, *weight))):
        return math.nan  # fsum raises if infinities of both signs are among them
    try:
        return math.fsum(total) / math.fsum(weight)
    except (OverflowError, ZeroDivisionError):
        return math.nan


def _two_sum(a: float, b: float) -> tuple[float, float]:
    """The rounded sum, and what rounding has left out (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
