"""What is in a store, as `CheckpointStore.list` finds it."""

from dataclasses import dataclass
from enum import StrEnum

from bamboo_core.checkpoint.layout import Attempt
from bamboo_core.checkpoint.manifest import CheckpointManifest


class FoundState(StrEnum):
    """The state of a folder in a store.

    Complete: the manifest is sound, and every file is there with its size; what is in them is only known by reading.
    Damaged: it was complete once. Unreadable: the store did not tell this time. Unfinished: it has no manifest.
    """

    COMPLETE = "Complete"
    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"
    UNFINISHED = "Unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An attempt's folder."""

    attempt: Attempt
    state: FoundState
    manifest: CheckpointManifest | None = None  # if it is sound
    reason: str = ""  # why it is not Complete
    bytes: int = 0
    # when the newest of its files was written, seconds since 1970; None if the store does not say
    modified: float | None = None

    @property
    def written(self) -> float | None:
        """The seconds since 1970 at which it was committed, or at which one of its files was last written, by the
        writer's clock.
        """
        return self.manifest.created.timestamp() if self.manifest else self.modified


def newest_first(found: Found) -> tuple[int, float, str]:
    """A sort key: by step; of the same step the one written last comes first."""
    return (-found.attempt.step, -(found.written or 0.0), found.attempt.id)
