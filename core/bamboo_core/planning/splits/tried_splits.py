"""What steps took with splits that have been tried: a measurement is believed before an estimate. Pure.

An estimate of a split shares a stage's seconds among its layers as their forwards do, and so may promise what does not
come true: a layer whose backward is dearer than its forward says, transfers, a device that is shared. What a split took
is remembered with the speeds of the workers at that time, and counts as long as these are about the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bamboo_core.planning.splits.uneven_split import Ranges

Pace = float | None  # how slow a worker is; 1 is usual; None if nobody can be compared with it
Paces = tuple[tuple[Pace, ...], ...]  # of each cell's worker, [pipeline][stage]

SAME_PACE: Final = 1.3  # speeds that differ by less are about the same; who is slower by more is a straggler
SAME_STEP: Final = 1.15  # durations of a step that differ by less are about the same
MOST_TRIED: Final = 16


@dataclass(frozen=True, slots=True)
class TriedSplit:
    """A split that was tried, and how fast it was."""

    stages: Ranges
    paces: Paces
    seconds: float  # that a step took with these stages, by workers of these paces


@dataclass(frozen=True, slots=True)
class Trial:
    """A split for the sake of speed, until it is known whether it pays."""

    stages: Ranges
    paces: Paces  # of the workers when that was decided
    before: float  # seconds of a step until then
    promised: float  # that are expected with it
    why: str  # for a person
    known: bool = False  # it was measured before


def are_alike(one: Paces, other: Paces) -> bool:
    """Are all workers about as fast as they were, in the same grid?"""
    if [len(row) for row in one] != [len(row) for row in other]:
        return False
    return all(_is_alike(*pair) for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True))


def _is_alike(one: Pace, other: Pace) -> bool:
    if one is None or other is None:
        return one is other
    return max(one, other) < SAME_PACE * min(one, other)


def are_less_known(now: Paces, before: Paces) -> bool:
    """Is there a worker that can be compared with nobody yet, and could be before?"""
    pairs = (pair for rows in zip(now, before, strict=False) for pair in zip(*rows, strict=False))
    return any(new is None and old is not None for new, old in pairs)


def comparable(tried: Sequence[TriedSplit], now: Ranges, paces: Paces, seconds: float) -> dict[Ranges, float]:
    """Seconds of a step with splits that were measured when all was about as it is.

    now, seconds: the split in force, and what a step takes with it. If that is not what it was, something has changed
    that does not show in the speeds (nobody can be compared with others, or it is no worker), and nothing counts.
    """
    found = {one.stages: one.seconds for one in tried if are_alike(one.paces, paces)}
    known = found.get(now)
    if known is None or max(known, seconds) >= SAME_STEP * min(known, seconds):
        return {}
    return found


def remembering(tried: Sequence[TriedSplit], new: TriedSplit) -> tuple[TriedSplit, ...]:
    """The tried splits with what was measured now, which replaces what was measured at about these speeds before; the
    oldest is forgotten.
    """
    others = [t for t in tried if t.stages != new.stages or not are_alike(t.paces, new.paces)]
    return (*others, new)[-MOST_TRIED:]
