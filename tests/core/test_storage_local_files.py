"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from bamboo_core.storage.local_files import whole_file


def write_half(file: Path) -> None:
    with whole_file(file) as written:
        written.write(b"half")
        raise OSError("full")


@pytest.mark.parametrize("before", [None, b"before"])
def test_what_cannot_be_written_to_the_end_changes_nothing(before: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    if before:
        file.write_bytes(before)
    with pytest.raises(OSError, match="full"):
        write_half(file)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == ({file.name: before} if before else {})
    with whole_file(file) as written:
        written.write(b"whole")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {file.name: b"whole"}


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
