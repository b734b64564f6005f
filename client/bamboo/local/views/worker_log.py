"""Live output of the workers' log while the workers write it, like `tail -f` (--debug)."""

import contextlib
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 20  # bytes read at once, and most bytes kept of an unfinished line


class LogFollower:
    """Reader that passes a growing file's text to `write`: whole lines, or parts of lines longer than CHUNK bytes."""

    def __init__(self, path: Path, write: Callable[[str], object]) -> None:
        self._path, self._write = path, write
        self._offset, self._partial = 0, b""

    def follow(self) -> bool:
        """Read and pass on at most CHUNK bytes, so that other work can run. Return False if nothing was read."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read(CHUNK)
            self._offset += len(data)
            lines, end, self._partial = (self._partial + data).rpartition(b"\n")
            self._put(lines + end)
            if len(self._partial) > CHUNK:
                self._rest()
            return bool(data)
        return False

    def end(self) -> None:
        """Read to the end of the file, and pass on its unfinished last line, too."""
        while self.follow():
            pass
        self._rest()

    def _rest(self) -> None:
        self._put(self._partial)
        self._partial = b""

    def _put(self, data: bytes) -> None:
        if data:
            self._write(data.decode(errors="replace"))
