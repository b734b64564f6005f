"""Choosing a checkpoint by store and optionally step, as a person names it. Pure."""

from collections.abc import Sequence
from typing import Final

from bamboo_core.checkpoint.errors import CheckpointError
from bamboo_core.checkpoint.found import Found, FoundState
from bamboo_core.checkpoint.manifest import CheckpointManifest

MOST_NAMED: Final = 5


def find(found: Sequence[Found], shown: str, step: int | None = None) -> tuple[CheckpointManifest, tuple[str, ...]]:
    """Return the newest complete checkpoint, or the newest one of the step, and a sentence for each newer damaged one.

    found: newest first. Raises CheckpointError with a sentence if there is none.
    """
    passed: list[str] = []
    for one in found:
        if step is not None and one.attempt.step != step:
            continue
        if one.state is FoundState.COMPLETE and one.manifest is not None:
            return one.manifest, tuple(passed)
        if one.state is not FoundState.UNFINISHED:
            passed.append(f"{one.attempt.folder} is passed over: {one.reason}")
    problem = f"; {passed[0]}" if passed else ""
    if step is None:
        raise CheckpointError(f"{shown} has no complete checkpoint{problem}")
    complete = list(dict.fromkeys(str(one.attempt.step) for one in found if one.state is FoundState.COMPLETE))
    more = f" and {len(complete) - MOST_NAMED} more" if len(complete) > MOST_NAMED else ""
    steps = f"steps {', '.join(complete[:MOST_NAMED])}{more}" if complete else "none"
    raise CheckpointError(f"{shown} has no complete checkpoint of step {step}{problem}; complete: {steps}")
