"""Scratch folders: each run removes its own and those that killed runs left, and no others."""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bamboo.local.scratch import PREFIX, collect, scratch_folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_goes_with_the_run(place: Path) -> None:
    with scratch_folder() as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        assert list(place.iterdir()) == [folder]
    assert list(place.iterdir()) == []


def test_a_run_removes_what_a_killed_one_has_left_and_nothing_else(place: Path) -> None:
    left, other = place / f"{PREFIX}left", place / "bamboo-other"
    for folder in (left, other):
        (folder / "tmp").mkdir(parents=True)
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}link").symlink_to(other)
    with scratch_folder() as first, scratch_folder() as second:
        assert first != second
        kept = {first, second, other, place / f"{PREFIX}file", place / f"{PREFIX}link"}
        assert set(place.iterdir()) == kept
    assert (other / "tmp").exists()


def test_a_folder_of_somebody_else_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / f"{PREFIX}theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    collect(place)
    assert (place / f"{PREFIX}theirs").exists()


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_folder_that_is_collected_before_it_is_locked_is_made_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another run, which starts at the same moment, removes the new folder before this run opens or locks it."""
    collected: list[Path] = []
    module = {"open": os, "flock": fcntl}[call]
    original = getattr(module, call)

    def late(*arguments: Any) -> Any:
        if not collected:
            collected.extend(place.iterdir())
            collected[0].rmdir()
        return original(*arguments)

    monkeypatch.setattr(module, call, late)
    with scratch_folder() as folder:
        assert collected
        assert collected != [folder]
        assert folder.exists()
