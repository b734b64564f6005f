"""The content of a store, as returned by `CheckpointStore.list`."""

from dataclasses import dataclass
from enum import StrEnum

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointManifest


class FoundState(StrEnum):
    """The state of a folder in a store. Complete: the manifest is sound, and every file has its size; their content is
    not read. Damaged: it was complete once. Unreadable: the store failed this time. Unfinished: it has no manifest.
    """

    COMPLETE = "Complete"
    DAMAGED = "Damaged"
    UNREADABLE = "Unreadable"
    UNFINISHED = "Unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The folder of an attempt."""

    attempt: CheckpointId
    state: FoundState
    manifest: CheckpointManifest | None = None  # if it is sound
    reason: str = ""  # why it is not Complete
    bytes: int = 0
    # when its newest file was written, seconds since 1970; None if the store does not say
    modified: float | None = None

    @property
    def written(self) -> float | None:
        """When it was committed, or its newest file was written, by the writer's clock, in seconds since 1970."""
        return self.manifest.created.timestamp() if self.manifest else self.modified


def newest_first(found: Found) -> tuple[int, float, str]:
    """Return a sort key: highest step first, and the newest first among equal steps."""
    return (-found.attempt.step, -(found.written or 0.0), found.attempt.id)
