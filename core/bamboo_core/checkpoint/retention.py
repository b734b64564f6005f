"""Which checkpoints and which remains of interrupted writes are removed. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bamboo_core.checkpoint.found import Found, FoundState, newest_first
from bamboo_core.checkpoint.layout import Attempt

DEAD_AFTER_SECONDS: Final = 24 * 3600.0
GIVEN_UP_SECONDS: Final = 3600.0  # twice as long as a checkpoint may take: who wrote nothing since then has given it up


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    attempt: Attempt
    reason: str
    bytes: int


def removable(
    found: Iterable[Found],
    keep: int,
    *,
    now: float,
    digest: str | None = None,
    writing: Collection[Attempt] = (),
    dead_after: float = DEAD_AFTER_SECONDS,
) -> tuple[Removal, ...]:
    """Oldest first.

    keep: so many complete ones stay, and at least the newest one, the one that was written last, and the one with the
    best score. digest: only checkpoints of this training are counted and removed; None: all are. writing: attempts in
    progress, which stay. now: seconds since 1970. dead_after: seconds after its last write from which any other
    unfinished one counts as dead; it does so earlier if a checkpoint of its step or a later one was written since.
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
    removals = []
    for one in reversed(everything):
        if one.attempt in kept or one.attempt in writing:
            continue
        if reason := _reason(one, complete, now - dead_after, ours=_ours(one, digest)):
            removals.append(Removal(attempt=one.attempt, reason=reason, bytes=one.bytes))
    return tuple(removals)


def removable_of_each(found: Sequence[Found], keep: int, *, now: float) -> tuple[Removal, ...]:
    """What `removable` gives for a store that may hold checkpoints of several trainings: `keep` of each
    training stay.
    """
    digests = {one.manifest.digest for one in found if one.state is FoundState.COMPLETE and one.manifest}
    of_each = [removable(found, keep, now=now, digest=digest) for digest in digests or [None]]
    removals = {removal.attempt: removal for removals in of_each for removal in removals}
    return tuple(removals[attempt] for attempt in sorted(removals))


def _reason(one: Found, complete: list[Found], dead: float, *, ours: bool) -> str:
    """Why it is removed, or nothing."""
    match one.state:
        case FoundState.COMPLETE if ours:
            return "there are newer ones"
        case FoundState.DAMAGED if complete and one.attempt.step <= complete[0].attempt.step and ours:
            return f"damaged: {one.reason}"
        case FoundState.UNFINISHED if one.modified is not None:
            if one.modified < dead or any(_overtook(other, one) for other in complete):
                return "the write was interrupted"
    return ""


def _overtook(complete: Found, unfinished: Found) -> bool:
    """Whoever was at a step has given up what it wrote if the step was written again, or a later one."""
    assert unfinished.modified is not None
    written = complete.written
    return complete.attempt.step >= unfinished.attempt.step and written is not None and written > unfinished.modified


def _ours(one: Found, digest: str | None) -> bool:
    """A damaged manifest does not say whose it is; in a store of one's own it is one's own."""
    if one.manifest is None:
        return True
    return digest in (None, one.manifest.digest)
