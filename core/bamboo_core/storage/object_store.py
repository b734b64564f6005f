"""File storage in an object store, through fsspec. An object appears only once it is complete."""

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bamboo_core.storage.bounded import StorageError
from bamboo_core.storage.files import Buffer, FileEntry, total
from bamboo_core.storage.url import StoreUrl

CONNECT_SECONDS: Final = 10
READ_SECONDS: Final = 60
CHUNK: Final = 64 << 20  # bytes read at a time; several reads run at once
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # by extra
# Options of each store's client: its timeouts
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"max_attempts": 2, "mode": "standard"},
        },
    },
    "gs": {"requests_timeout": READ_SECONDS},
    "az": {"connection_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS},
}
_MODIFIED: Final = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEntry:
    """A file at or below the root of an `ObjectFiles`."""

    name: str  # its path from the root; the file's name if the root is a file
    path: str  # the path to read it by; "" for the root itself
    size: int


def open_store(url: StoreUrl) -> "ObjectFiles":
    """Open an object store. Raises StorageError if a package cannot be imported; the client's own errors pass."""
    package = _PACKAGES.get(url.extra)
    try:
        if package is not None:
            importlib.import_module(package)
        import fsspec
    except ImportError as error:
        extra = f"bamboo-spot[{url.extra}]" if url.extra else "bamboo-spot"
        raise StorageError(
            f"{url.shown} needs the package {package or 'fsspec'}, which cannot be imported here "
            f"({type(error).__name__}): pip install '{extra}'"
        ) from None
    options = dict(_OPTIONS.get(url.extra, {}))
    options |= {"skip_instance_cache": True, "use_listings_cache": False}
    if url.extra == "gs":  # fsspec's default class asks for each bucket's kind, which needs a permission of its own
        plain = importlib.import_module("gcsfs.core").GCSFileSystem
        return ObjectFiles(plain(**options), plain._strip_protocol(url.path))
    return ObjectFiles(*fsspec.core.url_to_fs(url.path, **options))


class ObjectFiles:
    """The files of an object store. filesystem: fsspec's file system. root: a path in it."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs, self._root = filesystem, root.rstrip("/")

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        size = total(chunks)
        data = b"".join(chunks)
        self._fs.pipe_file(self._path(path), data)
        self._check(path, size)

    def create(self, path: str, data: bytes) -> None:
        """Create a file by a conditional request, or a plain one if the store lacks these. Raises FileExistsError."""
        where = self._path(path)
        if self._exists(path):
            raise FileExistsError(where)
        try:
            self._fs.pipe_file(where, data, mode="create")
        except (OSError, NotImplementedError, ValueError) as error:
            if isinstance(error, PermissionError | FileNotFoundError | ConnectionError | TimeoutError):
                raise
            if self._exists(path):
                raise FileExistsError(where) from None
            self._fs.pipe_file(where, data)
        self._check(path, len(data))

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`, or to the file's end. A large range takes several concurrent
        requests, since a single one does not use the client's full speed.
        """
        where = self._path(path)
        size = self._size(path)
        end = min(end, size)
        if end <= start:
            return b""
        if end - start <= CHUNK:
            return bytes(self._fs.cat_file(where, start=start, end=end))
        starts = list(range(start, end, CHUNK))
        ends = [min(one + CHUNK, end) for one in starts]
        return b"".join(self._fs.cat_ranges([where] * len(starts), starts, ends, max_gap=None, on_error="raise"))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return bytes that the file is known to have, in one request and without asking for its size."""
        return bytes(self._fs.cat_file(self._path(path), start=start, end=end)) if end > start else b""

    def walk(self) -> Sequence[RemoteEntry]:
        """Return all files below the root, at any depth, sorted by name; if the root is a file, only that. Raises
        FileNotFoundError if the root does not exist.
        """
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._root)
        except FileNotFoundError:
            self._check_bucket()
            raise
        if info["type"] == "file":
            return (RemoteEntry(name=self._root.rpartition("/")[2], path="", size=_bytes(info)),)
        found = self._fs.find(self._root, detail=True)
        sizes = {str(path)[len(self._root) :].lstrip("/"): _bytes(one) for path, one in found.items()}
        return tuple(RemoteEntry(name=name, path=name, size=sizes[name]) for name in sorted(sizes) if name)

    def list(self, folder: str) -> Sequence[FileEntry]:
        self._fs.invalidate_cache()
        where = self._path(folder)
        try:
            found = self._fs.ls(where, detail=True)
        except FileNotFoundError:
            self._check_bucket()
            return ()
        return tuple(_entry(one) for one in found if one["name"].rstrip("/") != where)

    def delete(self, path: str) -> None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(path), recursive=True)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.size(self._path(path)) or 0)

    def _exists(self, path: str) -> bool:
        try:
            self._size(path)
        except FileNotFoundError:
            return False
        return True

    def _check(self, path: str, size: int) -> None:
        """Check that the store has the written file in full size. Raises ConnectionError if not."""
        try:
            actual = self._size(path)
        except FileNotFoundError:
            raise ConnectionError("the store has forgotten a file that was written") from None
        if actual != size:
            raise ConnectionError(f"the store has {actual} bytes of a file of {size} bytes")

    def _check_bucket(self) -> None:
        """Raise FileNotFoundError if the bucket is missing; a missing folder alone is no error."""
        bucket = self._root.lstrip("/").partition("/")[0]
        if bucket and self._fs.protocol not in ("memory", ("memory",)) and not self._fs.exists(bucket):
            raise FileNotFoundError(f"there is no bucket {bucket}")


def _entry(found: Mapping[str, Any]) -> FileEntry:
    name = str(found["name"]).rstrip("/").rpartition("/")[2]
    if found["type"] == "directory":
        return FileEntry(name=name, size=None, modified=None)
    return FileEntry(name=name, size=_bytes(found), modified=_modified(found))


def _bytes(found: Mapping[str, Any]) -> int:
    return int(found.get("size") or 0)


def _modified(found: Mapping[str, Any]) -> float | None:
    for name in _MODIFIED:
        value = found.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
