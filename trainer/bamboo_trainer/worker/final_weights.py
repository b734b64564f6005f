"""A worker's part in keeping the final weights: writes the stages that it is asked for, and makes their folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bamboo_core.complaints import said_by
from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_core.storage.url import file_path
from bamboo_trainer.checkpoint.weights_folder import commit_weights, discard_weights, write_stage
from bamboo_trainer.commit.coordinator import Coordinator
from bamboo_trainer.stage.state.values import StageValues


class SaveError(Exception):
    """The final weights cannot be written; the message says where, and why."""


class FinalWeights:
    """worker: its name."""

    def __init__(self, worker: str, coordinator: Coordinator) -> None:
        self._worker, self._coordinator = worker, coordinator
        self._asked: list[Save] = []
        self._folders: dict[int, Path] = {}  # of the savings that this worker has written stages for

    def ask(self, request: Save) -> None:
        self._asked.append(request)

    def write(self, trained: Callable[[int], Sequence[StageValues]]) -> None:
        """What was asked for and is in its final state: of that `trained` has all parts. Raises SaveError."""
        for request in list(self._asked):
            if parts := trained(request.stage):
                self._asked.remove(request)
                self._write(parts, request)

    def _write(self, parts: Sequence[StageValues], request: Save) -> None:
        folder = _folder(request.path)
        self._folders[request.number] = folder
        tensors = {name: tensor for part in parts for name, tensor in part.state_tensors().items()}
        try:
            write_stage(folder, request.number, request.stage, request.stages, tensors, self._worker)
        except (OSError, ValueError) as error:
            raise SaveError(f"cannot write stage {request.stage} for {folder}: {said_by(error)}") from None
        self._coordinator.tell(Saved(stage=request.stage, number=request.number))

    def discard(self, number: int | None) -> None:
        """That saving is given up: remove what is written of it."""
        if number in self._folders:
            discard_weights(self._folders[number], number)

    def commit(self, request: CommitWeights) -> None:
        """Raises SaveError."""
        folder = _folder(request.path)
        try:
            commit_weights(folder, request.number, request.stages)
        except OSError as error:
            raise SaveError(f"cannot write {folder}: {said_by(error)}") from None
        self._coordinator.tell(WeightsCommitted(number=request.number))


def _folder(place: str) -> Path:
    """place: an absolute path, or its URL, which can be told also where the locale has no letters for it."""
    return Path(file_path(place) if place.startswith("file://") else place).resolve()
