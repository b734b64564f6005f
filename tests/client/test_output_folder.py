"""The output folder of a local run: its lock, for one run at a time, and refusals."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo.local.output_folder import OutputRefused, only_run_in

HOLDER = """
import sys, time
from pathlib import Path
from bamboo.local.output_folder import only_run_in
with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_belongs_to_one_run_until_that_ends_however_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputRefused, match=f"--output {folder}: another run writes into it"), only_run_in(folder):
            pass
        holder.kill()
    for _ in range(2):
        with only_run_in(folder), only_run_in(None):
            pass


def test_a_file_system_without_locks_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(lock: int, what: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with only_run_in(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()


def test_a_full_disk_and_weights_of_another_run_refuse_the_folder_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with only_run_in(tmp_path / "kept"):
        (tmp_path / "kept" / "weights" / "model").mkdir(parents=True)
    with (
        pytest.raises(OutputRefused, match="kept: it holds the weights of another run"),
        only_run_in(tmp_path / "kept"),
    ):
        pass
    monkeypatch.setattr(os, "fsync", is_full)
    told = f"--output {tmp_path}/new: No space left on device; a run needs at least 1 MiB there"
    with pytest.raises(OutputRefused, match=told), only_run_in(tmp_path / "new"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
