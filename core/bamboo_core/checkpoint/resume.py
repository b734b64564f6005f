"""Choosing the checkpoint that a job resumes from. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bamboo_core.checkpoint.found import Found, FoundState, newest_first
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint that a job resumes from."""

    manifest: CheckpointManifest | None  # None if there is none
    passed: tuple[tuple[CheckpointId, str], ...] = ()  # newer ones that were rejected, and why, newest first


def choose(
    found: Iterable[Found],
    digest: str,
    *,
    layers: int | None = None,
    steps: int | None = None,
    bad: Collection[CheckpointId] = (),
) -> Choice:
    """Return the newest complete checkpoint of this job.

    digest: of what the job's numbers depend on. layers: of the job's model; None if unknown. steps: the most that the
    checkpoint may have. bad: checkpoints that proved damaged when read. Newer unfinished ones are skipped silently,
    since their existence was never reported.
    """
    passed: list[tuple[CheckpointId, str]] = []
    for one in sorted(found, key=newest_first):
        if one.state is FoundState.UNFINISHED:
            continue
        reason = _unfit(one, digest, layers, bad)
        if not reason and steps is not None and one.attempt.step > steps:
            reason = f"it is of step {one.attempt.step}, and the job ends after {steps}"
        if not reason:
            return Choice(manifest=one.manifest, passed=tuple(passed))
        passed.append((one.attempt, reason))
    return Choice(manifest=None, passed=tuple(passed))


def _unfit(one: Found, digest: str, layers: int | None, bad: Collection[CheckpointId]) -> str:
    """Return why it cannot be used; "" if it can."""
    if one.manifest is None or one.state is not FoundState.COMPLETE:
        return one.reason
    if one.attempt in bad:
        return "a file of it is damaged, or what it was made of was wrong"
    if one.manifest.digest != digest:
        return f"it is of another training (job {one.manifest.job}): its task or its training section differs"
    if layers is not None and len(one.manifest.layers) != layers:
        return f"it has {len(one.manifest.layers)} layers, and the task has {layers}"
    return ""
