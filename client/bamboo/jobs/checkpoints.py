"""A job's checkpoints in the Python API."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime

from bamboo.jobs.errors import InvalidRequest
from bamboo_core.checkpoint.found import Found, FoundState, newest_first
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.errors import StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint of the state after `step`.

    state: Complete, Damaged, Unreadable or Unfinished; reason: why it is not Complete. written: time, None if the store
    does not tell.
    """

    step: int
    state: FoundState
    bytes: int
    written: datetime | None
    reason: str = ""


async def checkpoints_at(url: str) -> list[StoredCheckpoint]:
    """Return the checkpoints in a store, newest first. Raises InvalidRequest if it cannot be read."""
    try:
        checkpoints = await asyncio.to_thread(lambda: CheckpointStore(url).list())
    except (StorageError, ValueError) as error:
        raise InvalidRequest(str(error)) from None
    return [_checkpoint(one) for one in sorted(checkpoints, key=newest_first)]


def _checkpoint(found: Found) -> StoredCheckpoint:
    return StoredCheckpoint(
        step=found.attempt.step,
        state=found.state,
        bytes=found.bytes,
        written=None if found.written is None else datetime.fromtimestamp(found.written, UTC),
        reason=found.reason,
    )
