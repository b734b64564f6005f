"""A worker's final weights: writes the stages that the coordinator requests, and makes their folder."""

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bamboo_core.complaints import said_by, system_reason
from bamboo_core.control.protocol import MOST_TEXT, WorkerWarning
from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_core.storage.url import file_path
from bamboo_trainer.checkpoint.weights_folder import commit_weights, discard_weights, write_stage
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.stage.state.values import StageValues

AGAIN_SECONDS: Final = 5.0  # until a stage is written again after a full disk
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


class SaveError(Exception):
    """The final weights cannot be written; the message has the place and the reason."""


class FinalWeights:
    """worker: its name. now: a monotonic clock."""

    def __init__(self, worker: str, coordinator: Coordinator, now: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._coordinator, self._now = worker, coordinator, now
        self._asked: list[Save] = []
        self._again: float | None = None  # when to write again after a full disk
        self._folders: dict[int, Path] = {}  # of the saves that this worker has written stages for

    def ask(self, request: Save) -> None:
        self._asked.append(request)

    def write(self, trained: Callable[[int], Sequence[StageValues]]) -> None:
        """Write the requested stages whose final values `trained` returns, all parts of a stage.

        While a disk is full, warn once and try again, as somebody may make room. Raises SaveError otherwise.
        """
        if self._again is not None and self._now() < self._again:
            return
        for request in list(self._asked):
            if (parts := trained(request.stage)) and self._write(parts, request):
                self._asked.remove(request)

    def _write(self, parts: Sequence[StageValues], request: Save) -> bool:
        """Write a stage; return False if there was no room. Raises SaveError."""
        folder = _folder(request.path)
        self._folders[request.number] = folder
        tensors = {name: tensor for part in parts for name, tensor in part.state_tensors().items()}
        try:
            write_stage(folder, request.number, request.stage, request.stages, tensors, self._worker)
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and error.errno in _FULL):
                raise SaveError(f"cannot write stage {request.stage} for {folder}: {said_by(error)}") from None
            self._wait_for_room(f"{system_reason(error)}: make room for stage {request.stage} in {folder.parent}")
            return False
        self._again = None
        self._coordinator.tell(Saved(stage=request.stage, number=request.number))
        return True

    def _wait_for_room(self, text: str) -> None:
        if self._again is None:
            message = f"{text}; the trained weights wait for it, and the worker tries again every {AGAIN_SECONDS:g} s"
            self._coordinator.tell(WorkerWarning(reason="WeightsNotWritten", message=message[:MOST_TEXT]))
        self._again = self._now() + AGAIN_SECONDS

    def discard(self, number: int | None) -> None:
        """Remove what is written of a save that was given up."""
        if number in self._folders:
            discard_weights(self._folders[number], number)

    def commit(self, request: CommitWeights) -> None:
        """Commit a save. Raises SaveError."""
        folder = _folder(request.path)
        try:
            commit_weights(folder, request.number, request.stages)
        except OSError as error:
            raise SaveError(f"cannot write {folder}: {said_by(error)}") from None
        self._coordinator.tell(WeightsCommitted(number=request.number))


def _folder(place: str) -> Path:
    """Return the folder. place: an absolute path, or its URL, which also serves where the locale lacks letters."""
    return Path(file_path(place) if place.startswith("file://") else place).resolve()
