"""What it takes for a file on this machine to be there after a loss of power, too."""

import errno
import os
from pathlib import Path
from typing import Final

_NO_FOLDER_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR}


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, durable on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Makes the names in a folder durable on the disk. Some file systems cannot do it, and keep names in other ways."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder that may only be passed through, above the store's own
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
