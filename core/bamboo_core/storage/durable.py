"""Durable file writes on this machine, which survive a loss of power."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_NO_FOLDER_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR}


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears at that path, durably, when the block ends without an error. Until then the path keeps
    its previous content, if any. A path that is no regular file, such as a pipe, is written in place. Raises OSError.
    """
    target = path.resolve()  # resolves a symbolic link
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    sync_names(target.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable on disk. File systems that cannot do this keep names in other ways."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder above the store's own that this process may not read
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
