"""What a checkpoint store needs of the place where its files are. Paths are relative to the store's URL."""

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
    """Failures are whatever exceptions the place has: `bounded` explains them. Each method may be called by several
    threads, and again after it has failed.
    """

    def write(self, path: str, chunks: Sequence[Buffer]) -> None:
        """Durable when it returns; until then nothing or the file before is at that path, never a part."""

    def create(self, path: str, data: bytes) -> None:
        """Writes a file as `write` does; raises FileExistsError if there is such a file."""

    def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes from start to end (exclusive), or to the file's end. FileNotFoundError."""

    def list(self, folder: str) -> Sequence[FileEntry]:
        """What is in a folder, "" for the topmost; nothing if there is no such folder."""

    def delete(self, path: str) -> None:
        """A file, or a folder with all that is in it. Without an error if there is none."""


def total(chunks: Sequence[Buffer]) -> int:
    """The bytes of all chunks."""
    return sum(memoryview(chunk).nbytes for chunk in chunks)
