"""File storage on this machine or a mounted volume. Each file is complete, even after a power failure."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from bamboo_core.storage.files import Buffer, FileEntry

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
    with _partial_file(target) as file:
        yield file
        _sync_content(file)
        os.replace(file.name, target)


@contextmanager
def _partial_file(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file next to the target, which the caller fills, syncs, and renames or links to the target. Then
    remove the new file's own name, and make the target's name durable.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
    finally:
        partial.unlink(missing_ok=True)
    sync_names(target.parent)


def _sync_content(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces that path, durably, when the block ends without an error. Until then the path
    keeps its previous content, if any. Raises OSError.
    """
    target = path.absolute()
    partial, old = (target.with_name(f".{path.name}.{secrets.token_hex(4)}.{what}") for what in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        for written in (*partial.rglob("*"), partial):
            sync(written)
        if os.path.lexists(target):
            os.rename(target, old)
        os.rename(partial, target)
    except BaseException:
        if os.path.lexists(old):
            os.rename(old, target)
        raise
    finally:
        for left in (partial, old):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
    sync_names(target.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable on disk. Does nothing if the file system cannot do this, or the folder is
    unreadable.
    """
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


_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class LocalFiles:
    """The files below one folder, which is created with the first file."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        self._make((self._root / path).parent)
        with whole_file(self._root / path) as file:
            file.writelines(chunks)

    def create(self, path: str, data: bytes) -> None:
        target = self._root / path
        self._make(target.parent)
        with _partial_file(target) as file:
            file.write(data)
            _sync_content(file)
            try:
                os.link(file.name, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if target.exists():  # a file system without hard links cannot tell concurrent writers apart
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
                os.replace(file.name, target)

    def read(self, path: str, start: int, end: int) -> bytes:
        with (self._root / path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def list(self, folder: str) -> Sequence[FileEntry]:
        try:
            with os.scandir(self._root / folder) as found:
                entries = list(found)
        except FileNotFoundError:
            return ()
        return tuple(entry for found in entries if (entry := _entry(found)) is not None)

    def delete(self, path: str) -> None:
        target = self._root / path
        with contextlib.suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
            sync_names(target.parent)

    def _make(self, folder: Path) -> None:
        """Create a folder and its parents, each durably."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            if folder == folder.parent:
                break
            folder = folder.parent
        for one in reversed(missing):
            try:
                one.mkdir(exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one)) from None
            sync_names(one.parent)


def _entry(found: "os.DirEntry[str]") -> FileEntry | None:
    """Return the entry of a file or folder; None for other kinds, or if it has just been removed."""
    try:
        info = found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        return FileEntry(name=found.name, size=None, modified=info.st_mtime)
    return FileEntry(name=found.name, size=info.st_size, modified=info.st_mtime) if stat.S_ISREG(info.st_mode) else None
