"""The files of a dataset, on this machine or in an object store, as bytes.

`BlockCache` keeps blocks of an object store in a folder on this machine, which several processes share. A block has a
checksum, and gets its name only when it is complete. The folder stays below its size because processes that add blocks
remove the least recently used blocks.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from bamboo_core.complaints import system_reason
from bamboo_core.storage.bounded import BoundedCalls, MissingFile, StoreLimits, StoreUnavailable
from bamboo_core.storage.object_store import ObjectFiles, RemoteEntry, open_store
from bamboo_core.storage.url import parse_url
from bamboo_trainer.data.token_file import ByteSource

logger = logging.getLogger(__name__)

LARGE_BLOCK: Final = 4 << 20
SMALL_BLOCK: Final = 64 << 10
LIMITS: Final = StoreLimits(seconds=30.0, tries=8, pause=1.0)  # about two minutes of errors, six of silence
REMEMBERED: Final = 64 << 20  # bytes of blocks that a process keeps in memory
LEFT_AFTER_EVICTION: Final = 0.9  # of the size, so that not every added block leads to a scan of all blocks
LOOKED_AFTER: Final = 0.02  # of the size: having added this much, a process scans the folder again
USED_AGAIN_SECONDS: Final = 60.0  # the use of a block is marked at most this often
ABANDONED_SECONDS: Final = 3600.0  # an unfinished file of this age was left by a killed process
_DIGEST: Final = 16
_FOLDERS: Final = 256


class RemoteFiles:
    """The files of an object store below a URL, or the file at it. Each process makes its own clients, since a forked
    process cannot use its parent's.

    Raises StorageError of bamboo_core.storage; calls end in finite time.
    """

    def __init__(self, url: str, limits: StoreLimits = LIMITS) -> None:
        self._url, self._limits = parse_url(url, "the URL of data"), limits
        self.shown = self._url.shown
        self._clients: dict[int, tuple[BoundedCalls, ObjectFiles]] = {}  # by process

    @property
    def url(self) -> str:
        return self._url.path

    def list(self) -> Sequence[RemoteEntry]:
        """List the files below the URL, in all folders, by name; for the URL of a file, only that file."""
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

    def _client(self) -> tuple[BoundedCalls, ObjectFiles]:
        found = self._clients.get(os.getpid())
        if found is None:
            calls = BoundedCalls(self._limits)
            found = calls, calls.call(f"cannot open {self.shown}", partial(open_store, self._url))
            self._clients = {os.getpid(): found}
        return found


class CachedFile:
    """A remote file, read through the cache in blocks of `block` bytes. Reads raise StorageError."""

    def __init__(self, remote: RemoteFiles, entry: RemoteEntry, cache: "BlockCache", block: int) -> None:
        self.name = f"{remote.shown}/{entry.name}" if entry.path else remote.shown
        self.size = entry.size
        self._remote, self._entry, self._cache, self._block = remote, entry, cache, block
        self._key = f"{remote.url}\n{entry.path}\n{entry.size}\n{entry.version}\n{block}"

    def read(self, start: int, end: int) -> memoryview:
        assert 0 <= start <= end <= self.size
        pieces = [self._piece(number, start, end) for number in range(start // self._block, -(-end // self._block))]
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def content(self) -> bytes:
        return bytes(self.read(0, self.size))

    def _piece(self, number: int, start: int, end: int) -> memoryview:
        begin = number * self._block
        block = self._cache.block(self._key, number, self._fetch)
        return memoryview(block)[max(0, start - begin) : end - begin]

    def _fetch(self, number: int) -> bytes:
        begin = number * self._block
        return self._remote.read(self._entry, begin, min(begin + self._block, self.size))


class BlockCache:
    """An LRU cache of blocks of remote files, in a folder, with the last used blocks also in memory.

    folder: may be shared by processes. size: bytes that the folder may hold; a little more while several processes add
    blocks. block: bytes of a block. Raises ValueError for a size below two small blocks.
    """

    def __init__(self, folder: Path, size: int, block: int) -> None:
        if size < 2 * SMALL_BLOCK:
            raise ValueError(f"a cache of {size} bytes, expected at least {2 * SMALL_BLOCK}")
        self._folder, self._size = folder, size
        self._added = self._size  # bytes since the last scan of the folder; the first added block leads to a scan
        self._warned = False
        self.block = lru_cache(max(1, min(REMEMBERED, size) // block))(self._kept)

    def _kept(self, key: str, number: int, fetch: Callable[[int], bytes]) -> bytes:
        """Return a block from the folder, or else from `fetch`, which gets the block's number, and keep it there.

        key: of the file. number: of the block in the file.
        """
        name = hashlib.blake2b(f"{key}\n{number}".encode(), digest_size=_DIGEST).hexdigest()
        path = self._folder / name[:2] / name
        data = self._read(path)
        if data is None:
            data = fetch(number)
            self._write(path, data)
        return data

    def _read(self, path: Path) -> bytes | None:
        """Return a block, and mark it as used; None if it is missing, unreadable or damaged. Remove a damaged block."""
        try:
            with path.open("rb") as file:
                used = os.fstat(file.fileno()).st_mtime
                data = file.read()
            digest, block = data[:_DIGEST], data[_DIGEST:]
            if _digest(block) != digest:
                path.unlink(missing_ok=True)
                return None
            if time.time() - used > USED_AGAIN_SECONDS:
                os.utime(path)
        except FileNotFoundError:  # it was never there, or another process has just removed it
            return None
        except OSError as error:
            self._warn(error)
            return None
        return block

    def _write(self, path: Path, data: bytes) -> None:
        """Write a block, and evict others if needed. An error, such as a full disk, is only logged."""
        partial_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial_path.open("xb") as file:
                    file.write(_digest(data) + data)
                os.replace(partial_path, path)
            finally:
                partial_path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)
            return
        self._added += len(data)
        if self._added > self._size * LOOKED_AFTER:
            self._evict()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("blocks of remote data cannot be kept in %s: %s", self._folder, system_reason(error))

    def _evict(self) -> None:
        """Scan all blocks, and if they exceed the size, remove the least recently used. If another process is doing
        that already (file lock), return at once.
        """
        try:
            descriptor = os.open(self._folder / ".evicting", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            self._warn(error)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            blocks = sorted(self._blocks())
            total = sum(size for _, size, _ in blocks)
            if total > self._size:
                for _, size, path in blocks:
                    if total <= self._size * LEFT_AFTER_EVICTION:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    total -= size
            self._added = 0
        except BlockingIOError:
            logger.debug("another process looks at %s", self._folder)  # also at what this one has added
        finally:
            os.close(descriptor)

    def _blocks(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of last use, bytes and path of each block; remove unfinished files of killed processes."""
        now = time.time()
        for number in range(_FOLDERS):
            try:
                with os.scandir(self._folder / f"{number:02x}") as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            if entry.name.startswith(".") and now - status.st_mtime > ABANDONED_SECONDS:
                                os.unlink(entry.path)
                            else:
                                yield status.st_mtime, status.st_size, entry.path
            except FileNotFoundError:
                continue


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST).digest()


FOLDER_VARIABLE: Final = "BAMBOO_DATA_CACHE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of the cache for blocks of remote files. gigabytes: 10^9 bytes, for all processes together."""

    folder: str | None = None
    gigabytes: float = 8.0

    def __post_init__(self) -> None:
        if self.gigabytes < 0:
            raise ValueError(f"gigabytes must be at least 0, got {self.gigabytes:g}")

    @property
    def path(self) -> Path:
        """The folder: `folder`, else the value of the environment variable FOLDER_VARIABLE, else a private folder."""
        named = self.folder or os.environ.get(FOLDER_VARIABLE)
        return Path(named) if named else _private_folder()

    @property
    def bytes(self) -> int:
        return int(self.gigabytes * 1e9)


class LocalFile:
    """A file on this machine. `read` maps it into memory (mmap), which the system may drop; `content` does not."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Files in the order of their names. root: the folder that contains them, a prefix of their names."""

    root: str
    files: Sequence[ByteSource]
    # the names of the folders directly below the root, even if empty; none in an object store
    folders: Sequence[str] = ()


def open_sources(path: str, suffixes: Sequence[str], cache: CacheConfig | None = None) -> Sources:
    """Find a dataset's files: the file at a path or URL, or all files in that folder and its subfolders with one of the
    suffixes, by name, except hidden ones. cache: of remote files. Raises ValueError with a message; StorageError of
    bamboo_core.storage if a store does not answer.
    """
    parsed = parse_url(path, "the path or URL of data")
    if parsed.protocol == "file":
        return _local(parsed.path, suffixes)
    remote = RemoteFiles(path)
    entries = [entry for entry in remote.list() if _has(entry.name, suffixes)]
    if not entries:
        raise ValueError(f"{remote.shown} has no file {_named(suffixes)}")
    settings = cache or CacheConfig()
    folder = settings.path
    if folder == _private_folder():
        _claim(folder)
    all_fits = sum(entry.size for entry in entries) <= settings.bytes * LEFT_AFTER_EVICTION
    block = LARGE_BLOCK if all_fits else SMALL_BLOCK  # a small one is little more than a sample needs
    blocks = BlockCache(folder, settings.bytes, block)
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
    """Return this user's default folder for blocks. Other users may create it first, hence `_claim`."""
    return Path(tempfile.gettempdir()) / f"bamboo-data-{os.geteuid()}"


def _claim(folder: Path) -> None:
    """Create the private folder, or check that it is this user's, and deny others access (mode 700). Raises ValueError
    if it is another user's, or no folder.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return  # the cache logs that the folder is not writable, and continues without it
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
