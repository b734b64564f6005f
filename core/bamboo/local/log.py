"""Shows the workers' log while it is being written."""

import contextlib
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 20


class LogFollower:
    """Passes on what has been added to a file since the last time, whole lines only until the end."""

    def __init__(self, path: Path, write: Callable[[str], object]) -> None:
        self._path, self._write = path, write
        self._offset, self._partial = 0, b""

    def follow(self) -> None:
        """NB: the file may not be there yet."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as log:
            log.seek(self._offset)
            while data := log.read(CHUNK):
                self._offset += len(data)
                lines, end, self._partial = (self._partial + data).rpartition(b"\n")
                self._put(lines + end)

    def end(self) -> None:
        """Nothing more will be added."""
        self.follow()
        self._put(self._partial)
        self._partial = b""

    def _put(self, data: bytes) -> None:
        if data:
            self._write(data.decode(errors="replace"))
