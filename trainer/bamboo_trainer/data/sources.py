"""Readers of the bytes of token files, on this machine or in an object store."""

import mmap
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final

from bamboo_core.storage.bounded import BoundedCalls, MissingFile, StoreLimits, StoreUnavailable
from bamboo_core.storage.object_store import ObjectFiles, RemoteEntry, open_store
from bamboo_core.storage.url import parse_url

SUFFIX: Final = ".tokens"
BLOCK: Final = 64 << 10  # bytes; more than most samples need
REMEMBERED: Final = 64 << 20  # bytes of blocks that a process keeps in memory
LIMITS: Final = StoreLimits(seconds=30.0, tries=8, pause=1.0)  # about two minutes of errors, six of silence


class RemoteFiles:
    """The files of an object store below a URL, or the one file that the URL names. Each process makes its own clients,
    since a forked process cannot use its parent's.

    Raises ValueError for an invalid URL, and StorageError of bamboo_core.storage; calls end in finite time.
    """

    def __init__(self, url: str, limits: StoreLimits = LIMITS) -> None:
        self._url, self._limits = parse_url(url, "the URL of data"), limits
        self.shown = self._url.shown
        self._clients: dict[int, tuple[BoundedCalls, ObjectFiles]] = {}  # by process
        self.block = lru_cache(REMEMBERED // BLOCK)(self._read_block)

    def list(self) -> Sequence[RemoteEntry]:
        """Return the files below the URL, in all folders, sorted by name; for the URL of a file, only that file."""
        calls, files = self._client()
        try:
            return calls.call(f"cannot list {self.shown}", files.walk)
        except MissingFile as error:
            raise StoreUnavailable(f"cannot list {self.shown}: {error}") from None

    def read(self, entry: RemoteEntry, start: int, end: int) -> bytes:
        calls, files = self._client()
        what = f"cannot read {self.shown}" + (f"/{entry.name}" if entry.path else "")
        try:
            data = calls.call(what, lambda: files.read_range(entry.path, start, end), end - start)
        except MissingFile as error:
            raise StoreUnavailable(f"{what}: {error}") from None
        if len(data) != end - start:
            raise StoreUnavailable(f"{what}: the store gave {len(data)} of {end - start} bytes; has it been replaced?")
        return data

    def _read_block(self, entry: RemoteEntry, number: int) -> bytes:
        """Return block `number` of a file, of BLOCK bytes; the last one may be shorter."""
        begin = number * BLOCK
        return self.read(entry, begin, min(begin + BLOCK, entry.size))

    def _client(self) -> tuple[BoundedCalls, ObjectFiles]:
        found = self._clients.get(os.getpid())
        if found is None:
            calls = BoundedCalls(self._limits)
            found = calls, calls.call(f"cannot open {self.shown}", partial(open_store, self._url))
            self._clients = {os.getpid(): found}
        return found


class CachedFile:
    """A file in an object store. The process keeps the most recently used blocks in memory (LRU). name: for messages.
    size: in bytes. Reads raise StorageError.
    """

    def __init__(self, remote: RemoteFiles, entry: RemoteEntry) -> None:
        self.name = f"{remote.shown}/{entry.name}" if entry.path else remote.shown
        self.size = entry.size
        self._remote, self._entry = remote, entry

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes from `start` to `end` (exclusive). A range that is longer than a block takes one request,
        and is not kept in memory.
        """
        assert 0 <= start <= end <= self.size
        if end - start > BLOCK:
            return memoryview(self._remote.read(self._entry, start, end))
        first = start // BLOCK
        data = b"".join(self._remote.block(self._entry, number) for number in range(first, -(-end // BLOCK)))
        return memoryview(data)[start - first * BLOCK : end - first * BLOCK]


class LocalFile:
    """A file on this machine, mapped into memory (mmap) unless it is empty. name: its path. size: in bytes."""

    def __init__(self, path: str) -> None:
        self.name, self.size = path, os.stat(path).st_size
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.size else b""
        self._bytes = memoryview(mapped)

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes from `start` to `end` (exclusive)."""
        assert 0 <= start <= end <= self.size
        return self._bytes[start:end]


Source = LocalFile | CachedFile


def open_sources(path: str) -> Sequence[Source]:
    """Open the files of tokens at a path or URL: that file or, for a folder, all files *.tokens in it and below, sorted
    by path, except hidden files and folders. A file in an object store must be *.tokens, too. Raises ValueError if no
    file is found, one is unreadable, or the URL is invalid; StorageError if an object store fails.
    """
    parsed = parse_url(path, "the path or URL of data")
    if parsed.protocol == "file":
        try:
            return _local(parsed.path)
        except OSError as error:
            raise ValueError(f"cannot read {error.filename or parsed.path}: {error.strerror}") from error
    remote = RemoteFiles(path)
    files = [CachedFile(remote, entry) for entry in remote.list() if _is_one(entry.name)]
    if not files:
        raise ValueError(f"{remote.shown} has no file *{SUFFIX}")
    return files


def _local(path: str) -> Sequence[Source]:
    if os.path.isfile(path):
        return [LocalFile(path)]
    if not os.path.isdir(path):
        raise ValueError(f"cannot read {path}: there is no such file or folder")
    names: list[str] = []
    around = {path: {_identity(path)}}  # for each folder to come: itself and the folders that contain it
    for folder, folders, files in os.walk(path, followlinks=True):
        inside = around.pop(folder)
        below = {name: _identity(os.path.join(folder, name)) for name in folders if not name.startswith(".")}
        folders[:] = [name for name, identity in below.items() if identity not in inside]  # a link may lead back
        around |= {os.path.join(folder, name): inside | {below[name]} for name in folders}
        names += [os.path.join(folder, name) for name in files if _is_one(name)]
    if not names:
        raise ValueError(f"{path} has no file *{SUFFIX}")
    return [LocalFile(name) for name in sorted(names)]


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_one(name: str) -> bool:
    """Return whether a relative path ends with SUFFIX, in upper or lower case, and no part of the path is hidden."""
    return name.lower().endswith(SUFFIX) and not any(part.startswith(".") for part in name.split("/"))
