"""The files of a job's history, in a folder or an object store. A writer begins a new file when its last one is full.

000002-0000000017-000000.jsonl: attempt 2, the first file by the root of the plan of epoch 17. Each file has one writer,
so a root that was wrongly declared lost and still writes damages nothing.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bamboo_core.history.records import HistoryError, Record, from_lines, to_lines
from bamboo_core.job.spec import JobSpec
from bamboo_core.storage.bounded import BoundedCalls, MissingFile, StoreLimits, StoreUnavailable, at_once
from bamboo_core.storage.files import FileEntry, Files
from bamboo_core.storage.local_files import LocalFiles
from bamboo_core.storage.url import parse_url

FOLDER: Final = "history"
LARGEST: Final = 64 << 20  # bytes per file
LAST_EPOCH: Final = 10**10 - 1  # for records written after all workers have gone
LIMITS: Final = StoreLimits(seconds=20.0, tries=3, pause=0.5)
_PARTIAL: Final = re.compile(r"\.[0-9-]+\.jsonl\.[0-9a-f]+\.partial")
_NAME: Final = re.compile(r"([0-9]{6})-([0-9]{10})-([0-9]{6})\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class HistoryFile:
    """The identity of a history file, which makes up its name."""

    # attempt, epoch: see the module
    attempt: int
    epoch: int
    number: int  # counted by the writer

    @property
    def name(self) -> str:
        return f"{self.attempt:06}-{self.epoch:010}-{self.number:06}.jsonl"


def file_of(name: str) -> HistoryFile | None:
    """Parse the name of a history file; return None for any other name."""
    match = _NAME.fullmatch(name)
    return HistoryFile(*map(int, match.groups())) if match else None


class HistoryFiles:
    """The files of a job's history below one URL. Calls have a time limit (LIMITS) and raise StorageError if the store
    fails, or HistoryError if a file to read is missing or not a history.
    """

    def __init__(self, url: str) -> None:
        """Parse the URL; the first call opens the store. Raises ValueError for an unusable URL."""
        self._url, self.url = parse_url(url, "the URL of a history"), url
        self.shown = self._url.shown
        self._calls = BoundedCalls(LIMITS)
        self._files: Files | None = None

    def all(self) -> list[HistoryFile]:
        """List the history files in the order in which they were begun."""
        found = (file_of(name) for name in self.names())
        return sorted(file for file in found if file is not None)

    def names(self) -> Sequence[str]:
        """List the names of all files and folders; empty if the folder of the history is missing."""
        return [entry.name for entry in self._entries()]

    def _entries(self) -> Sequence[FileEntry]:
        files = self._open()
        try:
            return self._calls.call(f"cannot list {self.shown}", lambda: files.list(""))
        except MissingFile:
            return ()

    def read(self, file: HistoryFile) -> list[Record]:
        return from_lines(self._read(file.name), f"{self.shown}/{file.name}")

    def read_all(self) -> list[Record]:
        """Return the records of all files, in the files' order."""
        return [record for records in at_once(self.read, self.all()) for record in records]

    def write(self, file: HistoryFile, records: Sequence[Record]) -> None:
        """Replace the file's content by these records, atomically: a reader never sees only a part of them."""
        self.write_bytes(file.name, to_lines(records))

    def write_bytes(self, name: str, data: bytes) -> None:
        files = self._open()
        try:
            self._calls.call(f"cannot write {self._shown(name)}", partial(files.write, name, [data]), len(data))
        except MissingFile as error:
            raise StoreUnavailable(f"cannot write {self._shown(name)}: {error}") from None

    def remove_partial(self, *, older: float) -> None:
        """Remove killed writers' incomplete files, unchanged for `older` seconds or more; object stores have none."""
        files, now = self._open(), time.time()
        for entry in self._entries():
            if _PARTIAL.fullmatch(entry.name) and entry.modified is not None and now - entry.modified >= older:
                self._calls.call(f"cannot remove {self._shown(entry.name)}", partial(files.delete, entry.name))

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file; b"" if there is no such file."""
        try:
            return self._read(name)
        except HistoryError:
            return b""

    def _read(self, name: str) -> bytes:
        files = self._open()
        try:
            return self._calls.call(f"cannot read {self._shown(name)}", lambda: files.read(name, 0, LARGEST), 1 << 20)
        except MissingFile:
            raise HistoryError(f"{self._shown(name)} is not there") from None

    def _open(self) -> Files:
        if self._files is None:
            if self._url.protocol == "file":
                self._files = LocalFiles(self._url.path)
            else:
                from bamboo_core.storage.object_store import open_store  # clients of object stores import slowly

                self._files = self._calls.call(f"cannot open {self.shown}", partial(open_store, self._url))
        return self._files

    def _shown(self, path: str) -> str:
        return f"{self.shown.rstrip('/')}/{path}"


def find(url: str) -> HistoryFiles:
    """Find the history at a URL, or the history of the one job whose checkpoints or output are at the URL.

    Raises HistoryError for none or several histories, StorageError if a store fails, ValueError for an unusable URL.
    """
    for place in (url, f"{url.rstrip('/')}/{FOLDER}"):
        files = HistoryFiles(place)
        names = files.names()
        if any(file_of(name) for name in names):
            return files
        jobs = [name for name in names if place != url and HistoryFiles(f"{place}/{name}").all()]
        if len(jobs) > 1:
            shown = ", ".join(f"{files.shown}/{name}" for name in jobs)
            raise HistoryError(f"there are the histories of several jobs: {shown}; name one of them")
        if jobs:
            return HistoryFiles(f"{place}/{jobs[0]}")
    raise HistoryError(f"there is no history in {HistoryFiles(url).shown}")


def history_url(spec: JobSpec, output: Path | None = None, *, stored: bool = True) -> str:
    """Return the URL of a job's history: next to its checkpoints, else in the output folder; "" if it has neither.
    stored: whether checkpoints can be written; if False, the output folder is preferred.
    """
    if spec.checkpoint is not None and (stored or output is None):
        place = spec.checkpoint.place(spec.name)
    elif output is not None:
        place = output.absolute().as_uri()
    else:
        return ""
    return f"{place.rstrip('/')}/{FOLDER}/{spec.name}"
