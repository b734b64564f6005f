"""The folder for temporary files of a run, which is removed however the run ends.

The run removes it after an orderly end or a catchable signal; after SIGKILL, the next run on this machine removes the
unlocked folder.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "bamboo-run-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a new folder, locked by this process, and remove it after the block. First remove killed runs' folders."""
    collect(Path(tempfile.gettempdir()))
    folder, lock = _make()
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def collect(place: Path) -> None:
    """Remove the scratch folders that this user's killed runs left in `place`, recognized by their free locks."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has just gone, or belongs to another user
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its run lives
                    _remove(folder)
            finally:
                os.close(lock)


def _make() -> tuple[Path, int]:
    """Make and lock a folder; return it with the lock's descriptor. Retry if a run removes it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove the folder, even while another run removes it too. Log files that cannot be removed."""

    def log(_: object, path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            logger.warning("cannot remove %s: %s", path, error[1])

    shutil.rmtree(folder, onerror=log)
