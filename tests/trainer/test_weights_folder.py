"""The folder of final weights is there as a whole or not at all, whoever writes, commits or is late."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bamboo_core.checkpoint.errors import CheckpointError
from bamboo_trainer.checkpoint import weights_folder
from bamboo_trainer.checkpoint.sources import WeightsFolder
from bamboo_trainer.checkpoint.weights_folder import commit_weights, discard_weights, stages_of, write_stage


def tensors(value: float) -> dict[str, Tensor]:
    return {"layers.0.weight": torch.full((2,), value)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "job" / "weights"


def write(folder: Path, number: int, stages: int, value: float = 1.0, without: int | None = None) -> None:
    for stage in range(stages):
        if stage != without:
            write_stage(folder, number, stage, stages, tensors(value), "w0")


def content(folder: Path) -> dict[str, float]:
    return {path.name: load_file(path)["layers.0.weight"][0].item() for path in sorted(folder.iterdir())}


def around(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_nothing_is_in_the_folder_before_all_stages_are_committed(folder: Path) -> None:
    write(folder, 7, 2)
    assert not folder.exists()
    commit_weights(folder, 7, 2)
    assert content(folder) == {"stage-000.safetensors": 1.0, "stage-001.safetensors": 1.0}
    assert around(folder) == ["weights"]


def test_a_file_says_how_many_there_are_and_its_bytes_do_not_depend_on_the_saving(folder: Path) -> None:
    write(folder, 7, 3)
    write(folder, 8, 3)
    first, second = (folder.parent / f".weights-{number}" / "stage-001.safetensors" for number in (7, 8))
    with safe_open(first, "pt") as file:
        assert stages_of(file.metadata()) == 3
    assert first.read_bytes() == second.read_bytes()
    assert stages_of(None) is None
    assert stages_of({"format": "pt"}) is None


def test_a_saving_with_fewer_stages_leaves_none_of_the_one_that_was_given_up(folder: Path) -> None:
    write(folder, 7, 4, value=1.0)
    write(folder, 8, 3, value=2.0)
    commit_weights(folder, 8, 3)
    assert content(folder) == {f"stage-00{stage}.safetensors": 2.0 for stage in range(3)}
    assert around(folder) == ["weights"]


def test_a_commit_leaves_what_belongs_to_others(folder: Path) -> None:
    """Another job's saving, whose folder's name begins as this one's, and somebody's own hidden folder."""
    other = folder.with_name("weights-2")
    write(other, 7, 2)
    own = folder.with_name(".weights-notes")
    own.mkdir()
    write(folder, 7, 1)
    write(folder, 8, 1)
    commit_weights(folder, 8, 1)
    assert around(folder) == [".weights-2-7", ".weights-notes", "weights"]
    commit_weights(other, 7, 2)
    assert len(content(other)) == 2


def test_a_commit_may_be_repeated_by_another_worker(folder: Path) -> None:
    write(folder, 7, 2)
    for _ in range(2):
        commit_weights(folder, 7, 2)
    assert len(content(folder)) == 2


def test_who_is_late_with_a_stage_changes_nothing(folder: Path) -> None:
    write(folder, 7, 2, value=1.0)
    commit_weights(folder, 7, 2)
    write_stage(folder, 7, 1, 2, tensors(9.0), "late")
    write_stage(folder, 6, 3, 4, tensors(9.0), "late")
    commit_weights(folder, 7, 2)
    assert content(folder) == {"stage-000.safetensors": 1.0, "stage-001.safetensors": 1.0}
    assert around(folder) == ["weights"]


def test_what_a_killed_writer_has_left_is_not_among_the_weights(folder: Path) -> None:
    """Another worker has written the stage that it was writing, or one whose commit is said again finds it."""
    write(folder, 7, 2)
    partial = folder.with_name(".weights-7") / ".stage-001.safetensors.w1"
    partial.write_bytes(b"half")
    for _ in range(2):
        commit_weights(folder, 7, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["stage-000.safetensors", "stage-001.safetensors"]
        (folder / partial.name).write_bytes(b"half")
    commit_weights(folder, 7, 2)
    assert len(list(folder.iterdir())) == 2


def test_a_later_saving_takes_the_place_of_a_whole_one(folder: Path) -> None:
    """A coordinator that was restarted does not know that the one before had the weights already."""
    write(folder, 7, 3, value=1.0)
    commit_weights(folder, 7, 3)
    write(folder, 8, 2, value=2.0)
    commit_weights(folder, 8, 2)
    assert content(folder) == {"stage-000.safetensors": 2.0, "stage-001.safetensors": 2.0}
    assert around(folder) == ["weights"]


def test_a_commit_that_died_midway_is_brought_to_its_end_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 7, 1, value=1.0)
    commit_weights(folder, 7, 1)
    write(folder, 8, 1, value=2.0)
    rename, calls = Path.rename, []

    def dies_at_the_second(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        commit_weights(folder, 8, 1)
    monkeypatch.undo()
    assert not folder.exists()
    commit_weights(folder, 8, 1)
    assert content(folder) == {"stage-000.safetensors": 2.0}
    assert around(folder) == ["weights"]


def test_who_finds_the_old_ones_moved_away_already_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker has moved them, with all done, between this one's look at the folder and its move."""
    write(folder, 7, 2, value=1.0)
    commit_weights(folder, 7, 2)
    write(folder, 8, 2, value=2.0)
    rename = Path.rename

    def other_moves(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        rename(folder, folder.with_name(".weights-8-before"))
        rename(folder.with_name(".weights-8"), folder)
        return rename(path, target)  # onto the old ones

    monkeypatch.setattr(Path, "rename", other_moves)
    commit_weights(folder, 8, 2)
    assert content(folder) == {"stage-000.safetensors": 2.0, "stage-001.safetensors": 2.0}
    assert around(folder) == ["weights"]


@pytest.mark.parametrize("calls_before", [0, 1])
def test_two_that_commit_at_once_leave_one_whole_folder(
    calls_before: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one does all between two calls of this one: after the first look, or with the old one moved away."""
    write(folder, 7, 2, value=1.0)
    commit_weights(folder, 7, 2)
    write(folder, 8, 2, value=2.0)
    rename, calls = Path.rename, []

    def other_first(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == calls_before + 1:
            monkeypatch.undo()
            commit_weights(folder, 8, 2)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", other_first)
    commit_weights(folder, 8, 2)
    assert len(calls) == calls_before + 1
    assert content(folder) == {"stage-000.safetensors": 2.0, "stage-001.safetensors": 2.0}
    assert around(folder) == ["weights"]


def test_stages_that_are_not_there_are_not_committed(folder: Path) -> None:
    write(folder, 7, 3, without=1)
    with pytest.raises(FileNotFoundError, match="a stage of the final weights is missing"):
        commit_weights(folder, 7, 3)
    assert not folder.exists()


def test_an_empty_folder_is_no_obstacle_and_a_file_is_one(folder: Path) -> None:
    folder.mkdir(parents=True)
    write(folder, 7, 1)
    commit_weights(folder, 7, 1)
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be")
    with pytest.raises(NotADirectoryError):
        write(folder, 8, 1)
    assert around(folder) == ["weights"]


def test_what_is_given_up_is_removed_and_nothing_of_others(folder: Path) -> None:
    """Neither another job's saving, nor the file that a worker of this one is writing yet."""
    write(folder.with_name("weights-2"), 7, 2)
    write(folder, 7, 1, value=1.0)
    commit_weights(folder, 7, 1)
    write(folder, 8, 3, without=2)
    write(folder, 9, 2)
    unfinished = folder.with_name(".weights-8") / ".stage-002.safetensors.w2"
    unfinished.touch()
    discard_weights(folder, 8)
    assert list(unfinished.parent.iterdir()) == [unfinished]
    unfinished.rename(unfinished.with_name("stage-002.safetensors"))
    for _ in range(2):
        discard_weights(folder, 8)
    assert around(folder) == [".weights-2-7", ".weights-9", "weights"]
    assert len(content(folder.with_name(".weights-9"))) == 2
    assert content(folder) == {"stage-000.safetensors": 1.0}


def test_what_cannot_be_removed_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    write(folder, 7, 1)
    monkeypatch.setattr(Path, "unlink", refuse)
    discard_weights(folder, 7)
    assert ".weights-7 is of no use any more and cannot be removed: [Errno 13]" in caplog.text


def test_what_cannot_be_written_leaves_no_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(weights_folder, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        write(folder, 7, 1)
    assert list((folder.parent / ".weights-7").iterdir()) == []


def test_whoever_may_read_the_folder_may_read_its_files(folder: Path) -> None:
    write(folder, 7, 1)
    commit_weights(folder, 7, 1)
    beside = folder.parent / "beside"
    beside.touch()
    assert (folder / "stage-000.safetensors").stat().st_mode == beside.stat().st_mode


def test_complex_numbers_are_kept_and_what_the_format_does_not_have_is_named(folder: Path) -> None:
    turns = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    write_stage(folder, 7, 0, 1, {"layers.0.turns": turns.conj(), "layers.0.empty": torch.empty(0)}, "w0")
    commit_weights(folder, 7, 1)
    read = load_file(folder / "stage-000.safetensors")
    assert torch.equal(read["layers.0.turns"], turns.conj())
    assert read["layers.0.empty"].shape == (0,)
    with pytest.raises(ValueError, match=r"layers.0.turns is of torch.complex128, which"):
        write_stage(folder, 8, 0, 1, {"layers.0.turns": turns.to(torch.complex128)}, "w0")
    assert list((folder.parent / ".weights-8").iterdir()) == []


def test_a_folder_of_which_a_stage_is_missing_is_not_exported(folder: Path) -> None:
    write(folder, 7, 3)
    commit_weights(folder, 7, 3)
    (folder / "stage-002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stage-000.safetensors is one of 3 files of weights, and 2 are in its"):
        WeightsFolder(folder).entries()


@pytest.mark.parametrize("said", ['{"stages', "{}", '{"stages": null}', "2", "[]"])
def test_a_file_whose_metadata_is_damaged_is_named(said: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({"layers.0.weight": torch.ones(2)}, folder / "stage-000.safetensors", {"bamboo": said})
    with pytest.raises(CheckpointError, match=r"stage-000.safetensors is damaged: metadata 'bamboo': .*expected"):
        WeightsFolder(folder).entries()


def test_weights_that_do_not_say_how_many_there_are_are_exported_as_before(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({"layers.0.weight": torch.ones(2)}, folder / "stage-000.safetensors")
    assert [entry.name for entry in WeightsFolder(folder).entries()] == ["layers.0.weight"]


def test_metadata_of_another_version_may_say_more() -> None:
    assert stages_of({"bamboo": json.dumps({"stages": 2, "more": True})}) == 2
