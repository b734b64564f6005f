"""Gaps: the steps that a history lacks. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

Range = tuple[int, int]  # first and last
NOT_RECORDED: Final = "these steps could not be written in time and are not recorded"


def holes(present: Iterable[int], since: int) -> list[Range]:
    """Return the steps from `since` on that are missing before a present later step, in order."""
    gaps: list[Range] = []
    for step in sorted(set(present)):
        if step > since:
            gaps.append((since, step - 1))
        since = max(since, step + 1)
    return gaps


def without(missing: Range, present: Iterable[int]) -> list[Range]:
    """Return the rest of a range without these steps, in order."""
    first, last = missing
    return holes([*(step for step in present if first <= step <= last), last + 1], first)


def joined(ranges: Iterable[Range]) -> Sequence[Range]:
    """Merge these ranges into as few as possible, in order."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
