"""The output folder of a run, which only one run at a time may use."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bamboo_core.complaints import system_reason

WEIGHTS: Final = "weights"
LAST_STATE: Final = "last-state"  # the store of a job that keeps no other checkpoints
_FEWEST_MIB: Final = 1  # for the log, the history and the page of a short run
_NO_LOCKS: Final = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EINVAL}


class OutputRefused(Exception):
    """Error for an output folder that a run cannot use; the text is a sentence for the user."""


@contextmanager
def only_run_in(folder: Path | None) -> Iterator[None]:
    """Make the folder, and lock it against other runs during the block. Do nothing if it is None.

    On network file systems without locks, two runs in one folder go unnoticed. Raises OutputRefused if the folder
    cannot be made, locked or written, or has a run's weights. A new folder that cannot be written is removed again.
    """
    if folder is None:
        yield
        return
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputRefused(f"--output {folder}: {system_reason(error)}") from None
    try:
        _take(lock, folder)
        try:
            _check_contents(folder)
        except OutputRefused:
            if is_new:
                folder.rmdir()
            raise
        yield
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputRefused(f"--output {folder}: another run writes into it; expected a folder of its own") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OutputRefused(f"--output {folder}: {system_reason(error)}") from None


def _check_contents(folder: Path) -> None:
    """Raise OutputRefused if the folder has weights, or if _FEWEST_MIB MiB cannot be written there."""
    try:
        if any((folder / WEIGHTS).glob("*")):
            held = "it holds the weights of another run; expected a new or empty folder"
            raise OutputRefused(f"--output {folder}: {held}")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            left = memoryview(os.urandom(_FEWEST_MIB << 20))
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
    except OSError as error:
        needs = f"a run needs at least {_FEWEST_MIB} MiB there"
        raise OutputRefused(f"--output {folder}: {system_reason(error)}; {needs}") from None
