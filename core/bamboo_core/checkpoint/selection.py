"""The listed content of a checkpoint store, and the choice of checkpoints to resume from and to remove. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointError, CheckpointManifest


class ListedState(StrEnum):
    """The state of a folder in a store. Complete: the manifest is sound, and every file has the right size; file
    contents are not read. Damaged: the manifest is unsound, or a file is missing or has another size. Unreadable: the
    store failed this time. Unfinished: there is no manifest.
    """

    COMPLETE = "Complete"
    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"
    UNFINISHED = "Unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """The folder of an attempt to write a checkpoint, complete or not, as found in a store."""

    attempt: CheckpointId
    state: ListedState
    manifest: CheckpointManifest | None = None  # if it is sound
    reason: str = ""  # why it is not Complete
    bytes: int = 0
    # when its newest file was written, seconds since 1970; None if the store does not say
    modified: float | None = None

    @property
    def written(self) -> float | None:
        """The time of the commit, else of the newest file, in seconds since 1970; None if the store does not say."""
        return self.manifest.created.timestamp() if self.manifest else self.modified


def newest_first(listed: ListedCheckpoint) -> tuple[int, float, str]:
    """Return a sort key: highest step first, and the newest first among equal steps."""
    return (-listed.attempt.step, -(listed.written or 0.0), listed.attempt.id)


MOST_NAMED: Final = 5


def find(
    listed: Sequence[ListedCheckpoint], shown: str, step: int | None = None
) -> tuple[CheckpointManifest, tuple[str, ...]]:
    """Return the manifest of the newest complete checkpoint, and a sentence for each newer one that is damaged or
    unreadable. listed: newest first. shown: the store's URL, for messages. step: the only step to consider; None: all.
    Raises CheckpointError if no checkpoint is complete.
    """
    passed: list[str] = []
    for one in listed:
        if step is not None and one.attempt.step != step:
            continue
        if one.state is ListedState.COMPLETE and one.manifest is not None:
            return one.manifest, tuple(passed)
        if one.state is not ListedState.UNFINISHED:
            passed.append(f"{one.attempt.folder} is passed over: {one.reason}")
    problem = f"; {passed[0]}" if passed else ""
    if step is None:
        raise CheckpointError(f"{shown} has no complete checkpoint{problem}")
    complete = list(dict.fromkeys(str(one.attempt.step) for one in listed if one.state is ListedState.COMPLETE))
    more = f" and {len(complete) - MOST_NAMED} more" if len(complete) > MOST_NAMED else ""
    steps = f"steps {', '.join(complete[:MOST_NAMED])}{more}" if complete else "none"
    raise CheckpointError(f"{shown} has no complete checkpoint of step {step}{problem}; complete: {steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint that a job resumes from, if any, and the newer ones that were rejected."""

    manifest: CheckpointManifest | None  # None if there is none
    passed: tuple[tuple[CheckpointId, str], ...] = ()  # newer ones that were rejected, and why, newest first


def choose(
    listed: Iterable[ListedCheckpoint],
    digest: str,
    *,
    layers: int | None = None,
    steps: int | None = None,
    bad: Collection[CheckpointId] = (),
) -> Choice:
    """Return the newest complete checkpoint that this job can resume from, and the newer ones that were rejected.

    digest: the job's `numbers_digest`. layers: the number of layers of the job's model; None if unknown. steps: the
    largest step that the checkpoint may have. bad: checkpoints that proved damaged when read, or whose state may be
    wrong. Newer unfinished ones are skipped silently, since their existence was never reported.
    """
    passed: list[tuple[CheckpointId, str]] = []
    for one in sorted(listed, key=newest_first):
        if one.state is ListedState.UNFINISHED:
            continue
        reason = _unfit(one, digest, layers, bad)
        if not reason and steps is not None and one.attempt.step > steps:
            reason = f"it is of step {one.attempt.step}, and the job ends after {steps}"
        if not reason:
            return Choice(manifest=one.manifest, passed=tuple(passed))
        passed.append((one.attempt, reason))
    return Choice(manifest=None, passed=tuple(passed))


def _unfit(one: ListedCheckpoint, digest: str, layers: int | None, bad: Collection[CheckpointId]) -> str:
    """Return why the job cannot resume from this checkpoint, whatever its step; "" if it can."""
    if one.manifest is None or one.state is not ListedState.COMPLETE:
        return one.reason
    if one.attempt in bad:
        return "a file of it is damaged, or what it was made of was wrong"
    if one.manifest.digest != digest:
        return f"it is of another training (job {one.manifest.job}): its task or its training section differs"
    if layers is not None and len(one.manifest.layers) != layers:
        return f"it has {len(one.manifest.layers)} layers, and the task has {layers}"
    return ""


DEAD_AFTER_SECONDS: Final = 24 * 3600.0
GIVEN_UP_SECONDS: Final = 3600.0  # twice the limit for writing a checkpoint: a writer silent for longer has given up


def removable(
    listed: Iterable[ListedCheckpoint],
    keep: int,
    *,
    now: float,
    digest: str | None = None,
    dead_after: float = DEAD_AFTER_SECONDS,
) -> tuple[CheckpointId, ...]:
    """Return the attempts to remove, oldest first: surplus complete, old damaged and dead unfinished ones.

    keep: number of the newest complete checkpoints that stay, at least one. The one written last and the one with the
    best score stay, too. digest: checkpoints whose manifests have another digest are neither counted nor removed; None:
    all are counted. now: seconds since 1970. dead_after: an unfinished attempt counts as dead this many seconds after
    its last write, or earlier if a checkpoint of its step or a later one was written since.
    """
    everything = sorted(listed, key=newest_first)
    complete = [one for one in everything if one.state is ListedState.COMPLETE and _ours(one, digest)]
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


def _is_over(one: ListedCheckpoint, complete: list[ListedCheckpoint], dead: float, *, ours: bool) -> bool:
    """Return whether an attempt that is not kept may be removed: a complete one, a damaged one of no later step than
    the newest complete one, or a dead unfinished one. dead: attempts last written before this time, in seconds since
    1970, are dead. ours: the attempt belongs to the training that cleans up; if not, only a dead one may be removed.
    """
    match one.state:
        case ListedState.COMPLETE:
            return ours
        case ListedState.DAMAGED:
            return ours and bool(complete) and one.attempt.step <= complete[0].attempt.step
        case ListedState.UNFINISHED if one.modified is not None:
            return one.modified < dead or any(_overtook(other, one) for other in complete)
    return False


def _overtook(complete: ListedCheckpoint, unfinished: ListedCheckpoint) -> bool:
    """Return whether `complete` shows that the unfinished attempt was abandoned: it was written later, and has the same
    or a later step.
    """
    assert unfinished.modified is not None
    written = complete.written
    return complete.attempt.step >= unfinished.attempt.step and written is not None and written > unfinished.modified


def _ours(one: ListedCheckpoint, digest: str | None) -> bool:
    """Return whether a checkpoint belongs to the training with that digest; True if the digest is None, or if the
    checkpoint's manifest is missing or unreadable.
    """
    if one.manifest is None:
        return True
    return digest in (None, one.manifest.digest)
