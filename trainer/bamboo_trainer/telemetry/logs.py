"""What a worker writes for people: its log, and what the task prints.

Every line of the log has time, worker and step: so many are committed, and the next one is in progress. Local workers
share one file, so there what the task prints has them, too; a pod's log has one writer, and what the task prints there
stays as it is, for whatever reads it.
"""

import faulthandler
import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from bamboo_core.complaints import SilentErrorsNamed

FORMAT = "%(asctime)s %(levelname)s %(worker)s step %(step)s %(name)s: %(message)s"
LONGEST_LINE = 1 << 16  # characters without a line break after which one is made

Step = Callable[[], int | None]


def begin(worker: str, step: Step, *, shared: bool) -> None:
    """Makes this process's log that of the worker. step: the newest that is committed; None before training.

    shared: others write to the same file.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_Context(worker, step))
    handler.addFilter(SilentErrorsNamed())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("bamboo_trainer").setLevel(logging.WARNING if shared else logging.INFO)
    if not faulthandler.is_enabled():  # whoever forked this process may want to hear of a crash itself
        faulthandler.enable(sys.stderr, all_threads=False)  # the user's frames first, and no others' after them
    if shared:
        sys.stdout = Printed(sys.stdout, worker, step)
        sys.stderr = Printed(sys.stderr, worker, step)


def end() -> None:
    """This process ends soon: what was printed without the end of a line is a line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Printed):
            stream.close()


def _shown(step: Step) -> str:
    newest = step()
    return "-" if newest is None else str(newest)


class _Context(logging.Filter):
    """Adds worker and step to every record."""

    def __init__(self, worker: str, step: Step) -> None:
        super().__init__()
        self._worker, self._step = worker, step

    def filter(self, record: logging.LogRecord) -> bool:
        record.worker, record.step = self._worker, _shown(self._step)
        return True


class Printed(io.TextIOBase):
    """A text stream whose whole lines go to another one, each with time, worker and step, at once and in one piece."""

    def __init__(self, stream: TextIO, worker: str, step: Step) -> None:
        self._stream, self._worker, self._step = stream, worker, step
        self._partial: dict[int, str] = {}  # by thread: what one prints does not end up in another one's line

    def write(self, text: str) -> int:
        """A progress bar goes back to the start of its line; only what is left there at the end is a line."""
        thread = threading.get_ident()
        *lines, partial = (self._partial.pop(thread, "") + text).split("\n")
        partial = partial.rpartition("\r")[2] if partial[:-1].count("\r") else partial
        if len(partial) > LONGEST_LINE:
            lines, partial = [*lines, partial], ""
        if partial:
            self._partial[thread] = partial
        for line in lines:
            self._put(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        """A line that is not complete waits for its end."""
        self._stream.flush()

    def close(self) -> None:
        """The last lines may have no end. The other stream stays open."""
        while self._partial:
            self._put(self._partial.popitem()[1])

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> object:
        """The stream for who writes bytes, which stay as they are."""
        return self._stream.buffer

    def _put(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._stream.write(f"{stamp} {self._worker} step {_shown(self._step)} | {line}\n")
        self._stream.flush()
