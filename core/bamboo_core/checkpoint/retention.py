"""Choosing the checkpoints and the remains of interrupted writes to remove. Pure."""

from collections.abc import Iterable
from typing import Final

from bamboo_core.checkpoint.found import Found, FoundState, newest_first
from bamboo_core.checkpoint.layout import CheckpointId

DEAD_AFTER_SECONDS: Final = 24 * 3600.0
GIVEN_UP_SECONDS: Final = 3600.0  # twice the limit for writing a checkpoint: a writer silent for longer has given up


def removable(
    found: Iterable[Found],
    keep: int,
    *,
    now: float,
    digest: str | None = None,
    dead_after: float = DEAD_AFTER_SECONDS,
) -> tuple[CheckpointId, ...]:
    """Return the attempts to remove, oldest first.

    keep: the number of complete checkpoints that stay, at least the newest one, the one written last and the one with
    the best score. digest: only checkpoints of this training are counted and removed; None: all are. now: seconds since
    1970. dead_after: seconds after its last write when an unfinished attempt counts as dead; it does so earlier if a
    checkpoint of its step or a later one was written since.
    """
    everything = sorted(found, key=newest_first)
    complete = [one for one in everything if one.state is FoundState.COMPLETE and _ours(one, digest)]
    kept = {one.attempt for one in complete[: max(1, keep)]}
    if complete:
        kept.add(max(complete, key=lambda one: one.written or 0.0).attempt)
    scores = {one.attempt: one.manifest.score for one in reversed(complete) if one.manifest}
    scored = {attempt: score for attempt, score in scores.items() if score is not None}
    if scored:
        kept.add(max(scored, key=lambda attempt: scored[attempt]))  # of equal ones the oldest
    return tuple(
        one.attempt
        for one in reversed(everything)
        if one.attempt not in kept and _is_over(one, complete, now - dead_after, ours=_ours(one, digest))
    )


def _is_over(one: Found, complete: list[Found], dead: float, *, ours: bool) -> bool:
    """Return whether it may be removed: there are newer ones, it is damaged, or its write was interrupted."""
    match one.state:
        case FoundState.COMPLETE:
            return ours
        case FoundState.DAMAGED:
            return ours and bool(complete) and one.attempt.step <= complete[0].attempt.step
        case FoundState.UNFINISHED if one.modified is not None:
            return one.modified < dead or any(_overtook(other, one) for other in complete)
    return False


def _overtook(complete: Found, unfinished: Found) -> bool:
    """Return whether a later checkpoint shows that the unfinished attempt was abandoned: its step or a later one was
    written since.
    """
    assert unfinished.modified is not None
    written = complete.written
    return complete.attempt.step >= unfinished.attempt.step and written is not None and written > unfinished.modified


def _ours(one: Found, digest: str | None) -> bool:
    """Return whether it belongs to this training, which is assumed if its manifest is damaged."""
    if one.manifest is None:
        return True
    return digest in (None, one.manifest.digest)
