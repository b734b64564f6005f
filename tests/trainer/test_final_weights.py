"""A worker writes the stages that it is asked for once they are trained, and says what it has done, or why not."""

import errno
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bamboo_core.control.message import Message
from bamboo_core.control.protocol import WorkerWarning
from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_trainer.stage.state.values import StageValues
from bamboo_trainer.worker.final_weights import AGAIN_SECONDS, FinalWeights, SaveError
from recording_transport import Told
from stage_kit import CONFIG, small_task


@pytest.fixture
def said() -> Told:
    return Told()


@pytest.fixture
def weights(said: Told) -> FinalWeights:
    return FinalWeights("w0", said)


def request(folder: Path, stage: int = 0, number: int = 5) -> Save:
    return Save(stage=stage, stages=2, path=str(folder), number=number)


def stage(index: int) -> tuple[StageValues]:
    return (StageValues(small_task(), index, [(0, 1), (1, 3)], CONFIG),)


def test_only_what_is_trained_is_written_and_only_once(
    weights: FinalWeights, said: list[Message], tmp_path: Path
) -> None:
    for index in range(2):
        weights.ask(request(tmp_path / "weights", index))
    weights.write(lambda index: stage(1) if index == 1 else ())
    weights.write(lambda index: stage(1) if index == 1 else ())
    assert said == [Saved(stage=1, number=5)]
    weights.write(stage)
    assert said == [Saved(stage=1, number=5), Saved(stage=0, number=5)]
    weights.commit(CommitWeights(stages=2, path=str(tmp_path / "weights"), number=5))
    assert said[2:] == [WeightsCommitted(number=5)]
    assert len(list((tmp_path / "weights").iterdir())) == 2


def test_all_parts_of_a_stage_are_in_its_file(weights: FinalWeights, tmp_path: Path) -> None:
    """A worker with several devices has one on each."""
    weights.ask(request(tmp_path / "weights"))
    weights.write(lambda index: (*stage(0), *stage(1)))
    names = load_file(tmp_path / ".weights-5" / "stage-000.safetensors").keys()
    assert names == {f"layers.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}


def test_a_folder_elsewhere_is_reached_through_its_name(
    weights: FinalWeights, said: list[Message], tmp_path: Path
) -> None:
    """A person may keep the weights on another disk."""
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "weights").symlink_to(tmp_path / "disk" / "mine")
    for index in range(2):
        weights.ask(request(tmp_path / "weights", index))
    weights.write(stage)
    weights.commit(CommitWeights(stages=2, path=str(tmp_path / "weights"), number=5))
    assert len(list((tmp_path / "disk" / "mine").iterdir())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "weights"]


def test_weights_that_cannot_be_written_are_an_error_that_names_the_place_and_leave_nothing(
    weights: FinalWeights, said: list[Message], tmp_path: Path
) -> None:
    place = tmp_path / "weights"
    place.write_text("a file where the folder should be")
    weights.ask(request(place))
    with pytest.raises(SaveError, match=rf"cannot write stage 0 for {place}: .*Not a directory"):
        weights.write(stage)
    assert (said, [file.name for file in tmp_path.iterdir()]) == ([], ["weights"])


def test_a_full_disk_is_told_once_and_tried_again_until_there_is_room(
    said: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = [100.0], [0]

    def full(*_: object) -> None:
        tries[0] += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weights = FinalWeights("w0", said, lambda: clock[0])
    weights.ask(request(tmp_path / "weights"))
    with monkeypatch.context() as patched:
        patched.setattr("bamboo_trainer.checkpoint.weights_folder.sync", full)
        for _ in range(3):
            weights.write(stage)
            weights.write(stage)
            clock[0] += AGAIN_SECONDS
    assert tries == [3]
    (warning,) = said
    assert isinstance(warning, WorkerWarning)
    assert warning.reason == "WeightsNotWritten"
    assert warning.message.startswith(f"No space left on device: make room for stage 0 in {tmp_path}; ")
    weights.write(stage)
    assert said[1:] == [Saved(stage=0, number=5)]


def test_a_folder_of_which_a_stage_is_missing_is_not_committed(
    weights: FinalWeights, said: list[Message], tmp_path: Path
) -> None:
    weights.ask(request(tmp_path / "weights"))
    weights.write(stage)
    with pytest.raises(SaveError, match="a stage of the final weights is missing"):
        weights.commit(CommitWeights(stages=2, path=str(tmp_path / "weights"), number=5))
    assert said == [Saved(stage=0, number=5)]
