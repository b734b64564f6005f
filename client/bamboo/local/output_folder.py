"""The folder that a run keeps its results in: one run's at a time, and without what killed writers have left in it."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

WEIGHTS: Final = "weights"
_NO_LOCKS: Final = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EINVAL}
_SAVING: Final = re.compile(rf"\.{WEIGHTS}-\d+(-before)?")  # as the trainer calls what becomes the weights


class OutputInUse(Exception):
    """An error for a folder into which another run writes; the text is a sentence for the user."""


@contextmanager
def only_run_in(folder: Path | None) -> Iterator[None]:
    """Makes the folder; meanwhile no other run may write there. That ends with this process, however it ends.

    Some network file systems have no locks; there two runs are not told from one. Raises OutputInUse, OSError.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUse(f"--output {folder}: another run writes into it; expected a folder of its own") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(lock)


def tidy(folder: Path) -> None:
    """Removes savings of weights that were given up: those who wrote them have gone, and nobody else will finish them.

    What was moved away to make room stays if nothing has come into its place. Raises OSError.
    """
    there = (folder / WEIGHTS).is_dir()
    for path in folder.iterdir():
        saving = _SAVING.fullmatch(path.name)
        if saving and (there or not saving[1]):
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
