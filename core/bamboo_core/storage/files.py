"""The interface of file storage that a checkpoint store needs. Paths are relative to the store's URL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file or a folder of a store."""

    name: str
    size: int | None  # bytes; None for a folder
    modified: float | None  # seconds since 1970; None if the store does not say


class Files(Protocol):
    """File storage. Thread-safe, and calls may be repeated after a failure. Exceptions are the backend's; `bounded`
    explains them.
    """

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        """Write a file durably. Until it is complete, the path has nothing or the previous file, never a part."""

    def create(self, path: str, data: bytes) -> None:
        """Write a new file as `write` does. Raises FileExistsError if it exists."""

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes from start to end (exclusive) or to the file's end. Raises FileNotFoundError."""

    def list(self, folder: str) -> Sequence[FileEntry]:
        """Return the entries of a folder (the topmost one is ""); empty if there is no such folder."""

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content. No error if there is none."""


def total(chunks: Sequence[Buffer]) -> int:
    """Return the number of bytes in all chunks together."""
    return sum(memoryview(chunk).nbytes for chunk in chunks)
