"""Which steps a history lacks. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

Range = tuple[int, int]  # first and last
NOT_RECORDED: Final = "these steps could not be written in time and are not recorded"


def holes(present: Iterable[int], since: int) -> list[Range]:
    """The steps from `since` on that are not among these although a later one is, in order."""
    found: list[Range] = []
    for step in sorted(set(present)):
        if step > since:
            found.append((since, step - 1))
        since = max(since, step + 1)
    return found


def without(missing: Range, present: Iterable[int]) -> list[Range]:
    """What is left of that range when these steps are taken out, in order."""
    first, last = missing
    return holes([*(step for step in present if first <= step <= last), last + 1], first)


def joined(ranges: Iterable[Range]) -> Sequence[Range]:
    """These steps in as few ranges as possible, in order."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
