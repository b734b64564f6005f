"""Writing of local files and folders, whole or not at all; links and pipes stay what they are."""

import os
from pathlib import Path

import pytest

from bamboo_core.storage.local_files import whole_file, whole_folder


def write_half(path: Path, folder: bool) -> None:
    if folder:
        with whole_folder(path) as made:
            (made / "part").write_bytes(b"half")
            raise OSError("full")
    with whole_file(path) as written:
        written.write(b"half")
        raise OSError("full")


@pytest.mark.parametrize("before", [None, b"before"])
@pytest.mark.parametrize("folder", [False, True])
def test_what_cannot_be_written_to_the_end_changes_nothing(before: bytes | None, folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "output"
    if before:
        path.write_bytes(before)
    with pytest.raises(OSError, match="full"):
        write_half(path, folder)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == ({path.name: before} if before else {})
    if folder:
        for content in (b"whole", b"again"):
            with whole_folder(path) as made:
                (made / "part").write_bytes(content)
            assert [one.read_bytes() for one in path.iterdir()] == [content]
    else:
        with whole_file(path) as written:
            written.write(b"whole")
        assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "output"
    path.mkdir()
    (path / "part").write_bytes(b"before")
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError("refused")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="refused"), whole_folder(path) as made:
        (made / "part").write_bytes(b"whole")
    assert {one.name for one in tmp_path.iterdir()} == {"output"}
    assert (path / "part").read_bytes() == b"before"


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    with whole_file(link) as written:
        written.write(b"whole")
    assert (link.is_symlink(), (tmp_path / "file").read_bytes()) == (True, b"whole")
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as written:
        written.write(b"through")
    assert os.read(reading, 100) == b"through"
    os.close(reading)
