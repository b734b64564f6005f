"""Sums of numbers without rounding, each held as a few terms that workers send instead of all numbers.

`math.fsum` of the terms of several such sums is the exactly rounded sum of all their numbers, so it does not depend on
how they were divided. After Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997 (grow-expansion).
"""

import math
from collections.abc import Iterable, Mapping, Sequence


def exact_terms(numbers: Iterable[float]) -> list[float]:
    """Return at most about 40 terms with exactly the numbers' sum, or the first number that is not finite."""
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
    """Return for each name the exact terms of its sums and of its weights."""
    pairs_by_name: dict[str, list[tuple[float, float]]] = {}
    for one in measured:
        for name, pair in one.items():
            pairs_by_name.setdefault(name, []).append(pair)
    return {
        name: (exact_terms(total for total, _ in pairs), exact_terms(weight for _, weight in pairs))
        for name, pairs in sorted(pairs_by_name.items())
    }


def quotient(total: Sequence[float], weight: Sequence[float]) -> float:
    """Return the quotient of the terms' exactly rounded sums; NaN if a term is not finite or the weight is 0."""
    if not all(map(math.isfinite, (*total, *weight))):
        return math.nan  # fsum raises if they include infinities of both signs
    try:
        return math.fsum(total) / math.fsum(weight)
    except (OverflowError, ZeroDivisionError):
        return math.nan


def _two_sum(a: float, b: float) -> tuple[float, float]:
    """Return the rounded sum and its rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
