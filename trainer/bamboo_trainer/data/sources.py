"""The files of a dataset, on this machine or in an object store, as bytes."""

import contextlib
import mmap
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bamboo_core.storage.url import parse_url
from bamboo_trainer.data.block_cache import BlockCache, CachedFile, RemoteFiles
from bamboo_trainer.data.token_file import ByteSource

DEFAULT_GIGABYTES: Final = 8.0
FOLDER_VARIABLE: Final = "BAMBOO_DATA_CACHE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The folder for blocks of remote files, and its size: `bytes` for all its users together."""

    folder: Path
    bytes: int

    @classmethod
    def default(cls) -> "CacheConfig":
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(folder=Path(folder) if folder else _private_folder(), bytes=int(DEFAULT_GIGABYTES * 1e9))


class LocalFile:
    """A file on this machine. `read` maps it, so that the system keeps or drops its pages; `content` does not."""

    __slots__ = ("_bytes", "_size", "name")

    def __init__(self, path: str) -> None:
        self.name = path
        self._size: int | None = None
        self._bytes: memoryview | None = None

    @property
    def size(self) -> int:
        if self._size is None:
            self._size = os.stat(self.name).st_size
        return self._size

    def read(self, start: int, end: int) -> memoryview:
        assert 0 <= start <= end <= self.size
        if self._bytes is None:
            with open(self.name, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.size else b""
            self._bytes = memoryview(mapped)
        return self._bytes[start:end]

    def content(self) -> bytes:
        with open(self.name, "rb") as file:
            return file.read()

    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalFile, (self.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Files in the order of their names. root: the folder that contains them, a prefix of their names."""

    root: str
    files: Sequence[ByteSource]
    # the names of those right below it, also of empty ones; object stores have none
    folders: Sequence[str] = ()


def open_sources(path: str, suffixes: Sequence[str], cache: CacheConfig | None = None) -> Sources:
    """Return the file at that path or URL, or the files in that folder and below it with one of the suffixes, by name.

    Leaves out hidden files, such as unfinished ones. Raises ValueError with a message; StorageError of
    bamboo_core.storage if a store does not answer.
    """
    parsed = parse_url(path, "the path or URL of data")
    if parsed.protocol == "file":
        return _local(parsed.path, suffixes)
    remote = RemoteFiles(path)
    entries = [entry for entry in remote.list() if _has(entry.name, suffixes)]
    if not entries:
        raise ValueError(f"{remote.shown} has no file {_named(suffixes)}")
    settings = cache or CacheConfig.default()
    if settings.folder == _private_folder():
        _claim(settings.folder)
    blocks = BlockCache(settings.folder, settings.bytes)
    block = BlockCache.block_size(sum(entry.size for entry in entries), settings.bytes)
    return Sources(root=remote.shown, files=[CachedFile(remote, entry, blocks, block) for entry in entries])


def _local(path: str, suffixes: Sequence[str]) -> Sources:
    if os.path.isfile(path):
        return Sources(root=os.path.dirname(path), files=[LocalFile(path)])
    if not os.path.isdir(path):
        raise ValueError(f"cannot read {path}: there is no such file or folder")
    names: list[str] = []
    topmost: list[str] = []
    around = {path: {_identity(path)}}  # for each folder to come: itself and the folders that contain it
    for folder, folders, files in os.walk(path, followlinks=True):
        inside = around.pop(folder)
        below = {name: _identity(os.path.join(folder, name)) for name in folders if not name.startswith(".")}
        folders[:] = [name for name, identity in below.items() if identity not in inside]  # a link may lead back
        around |= {os.path.join(folder, name): inside | {below[name]} for name in folders}
        if folder == path:
            topmost = sorted(folders)
        names += [os.path.join(folder, name) for name in files if _has(name, suffixes)]
    if not names:
        raise ValueError(f"{path} has no file {_named(suffixes)}")
    return Sources(root=path, files=[LocalFile(name) for name in sorted(names)], folders=topmost)


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _private_folder() -> Path:
    """Return the default folder for blocks: below a folder that all users of the machine may write to."""
    return Path(tempfile.gettempdir()) / f"bamboo-data-{os.geteuid()}"


def _claim(folder: Path) -> None:
    """Claim a folder, so that no other user has put or will put blocks there. Raises ValueError if it is not this
    user's.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return  # the cache reports that it is not writable, and continues without
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError(
            f"{folder}, for blocks of remote data, is not a folder of this user (id {os.geteuid()}); name another one "
            f"as cache.folder or in ${FOLDER_VARIABLE}"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


def _has(name: str, suffixes: Sequence[str]) -> bool:
    return name.lower().endswith(tuple(suffixes)) and not any(part.startswith(".") for part in name.split("/"))


def _named(suffixes: Sequence[str]) -> str:
    return f"*{suffixes[0]}" if len(suffixes) == 1 else f"of the kinds {', '.join(suffixes)}"
