"""Standard input, output and error that may be closed, on a full disk, or without a reader."""

import codecs
import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TextIO

from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED, EXIT_OK

MOST_WAITING: Final = 1 << 20  # bytes not yet read
PATIENCE_SECONDS: Final = 60.0  # at the end, for a reader that stalls
SHOWN: Final = "bamboo.shown"  # the error handler for characters that a stream's encoding lacks


def prepare() -> None:
    """Prepare the standard streams at the start of a program, before it opens any file.

    A closed stream is opened on /dev/null: otherwise the next file would get its number. Any text can be written: file
    names as their bytes, other characters with the encoding's replacement.
    """
    codecs.register_error(SHOWN, _shown)
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SHOWN)
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        output = _Output(1, "w", closefd=False)
        unbuffered = stream.write_through  # set by PYTHONUNBUFFERED
        sys.stdout = io.TextIOWrapper(
            output if unbuffered else io.BufferedWriter(output),
            stream.encoding,
            SHOWN,
            line_buffering=stream.line_buffering,
            write_through=unbuffered,
        )


class OutputLost(OSError):
    """Standard output cannot be written, and not because its reader has gone."""


class _Output(io.FileIO):
    """Standard output, whose errors differ in type from those of other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from None


def _shown(error: UnicodeError) -> tuple[bytes, int]:
    """Return the bytes for a character that an encoding lacks. If the locale names no encoding, UTF-8 is assumed."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    name = codecs.lookup(error.encoding).name
    encoded = b""
    for letter in error.object[error.start : error.end]:
        if 0xDC80 <= ord(letter) <= 0xDCFF:
            encoded += bytes([ord(letter) - 0xDC00])
        elif name == "ascii":
            encoded += letter.encode("utf-8", "backslashreplace")
        else:
            encoded += letter.encode(error.encoding, "backslashreplace")
    return encoded, error.end


def give_up(stream: TextIO) -> None:
    """Discard everything written to the stream from now on, and what is buffered, without errors."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end(code: int, lost: OSError | None = None) -> int:
    """Flush the standard streams at the end of a program; return its exit code.

    A failure to write standard output turns code 0 into EXIT_FAILED, unless the reader stopped reading, as in `bamboo
    history JOB | head`. lost: an error that was already raised.
    """
    lost = _flushed(sys.stdout) or lost
    if lost is not None and lost.errno != errno.EPIPE:
        complain(f"cannot write standard output: {system_reason(lost)}")
        code = code or EXIT_FAILED
    _flushed(sys.stderr)
    return code


def _flushed(stream: TextIO) -> OSError | None:
    """Return the error if the stream cannot be flushed; it is then given up."""
    try:
        stream.flush()
    except OSError as error:
        give_up(stream)
        return error
    return None


def exit_of(main: Callable[[], int]) -> int:
    """Run a program and return its exit code. Its reader may stop reading early."""
    prepare()
    try:
        return end(main())
    except OutputLost as error:
        return end(EXIT_FAILED, error)
    except BrokenPipeError:
        give_up(sys.stdout)
        return EXIT_OK


class Unhurried(io.RawIOBase):
    """A stream that writes to a descriptor in a thread of its own, so a slow or absent reader does not block the
    writer.

    lost: called once, in that thread, when nothing can be written any more. Beyond MOST_WAITING bytes the oldest are
    dropped, and a line says how many.
    """

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]) -> None:
        self._descriptor, self._lost = descriptor, lost
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = self._left_out = 0
        self._moved = 0  # bytes written
        self._gone = False
        threading.Thread(target=self._run, name="standard stream", daemon=True).start()

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        with self._changed:
            if not self._gone:
                self._waiting.append(piece)
                self._size += len(piece)
                while self._size > MOST_WAITING and len(self._waiting) > 1:
                    self._left_out += len(self._waiting[0])
                    self._size -= len(self._waiting.popleft())
                self._changed.notify_all()
        return len(piece)

    def finish(self, patience: float) -> None:
        """Wait until all is written. Give up on a reader that takes nothing for `patience` seconds."""
        with self._changed:
            while self._size and not self._gone:
                moved = self._moved
                if not self._changed.wait_for(partial(self._moves_on, moved), patience):
                    self._gone = True

    def _moves_on(self, moved: int) -> bool:
        return self._moved != moved or self._gone

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting.popleft()
                if self._left_out:
                    note = f"\n[{self._left_out} bytes are left out here: they were not read]\n".encode()
                    self._left_out, self._size, piece = 0, self._size + len(note), note + piece
            try:
                self._put(piece)
            except OSError as error:
                with self._changed:
                    first, self._gone = not self._gone, True
                    self._waiting.clear()
                    self._size = 0
                    self._changed.notify_all()
                if first:
                    self._lost(error)

    def _put(self, piece: bytes) -> None:
        while piece:
            try:
                written = os.write(self._descriptor, piece)
            except BlockingIOError:  # another process made the pipe or terminal non-blocking
                select.select([], [self._descriptor], [])
                continue
            piece = piece[written:]
            with self._changed:
                self._size -= written
                self._moved += written
                self._changed.notify_all()


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Let a job go on without a reader of its output, inside this context."""
    before = sys.stdout, sys.stderr
    raws: list[Unhurried] = []

    def wrapped(stream: TextIO, lost: Callable[[OSError], None]) -> TextIO:
        if not isinstance(stream, io.TextIOWrapper):
            return stream  # a test's, or a notebook's
        try:
            descriptor = stream.fileno()
        except OSError:
            return stream
        with contextlib.suppress(OSError):
            stream.flush()
        raws.append(raw := Unhurried(descriptor, lost))
        return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)

    def on_lost(error: OSError) -> None:
        complain(f"standard output cannot be written ({system_reason(error)}): the job goes on without")

    errors = wrapped(sys.stderr, lambda error: None)
    try:
        output = wrapped(sys.stdout, on_lost)
        sys.stdout, sys.stderr = output, errors
        yield
    finally:
        written = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in written:
            stream.flush()
        for raw in raws[::-1]:
            raw.finish(PATIENCE_SECONDS)
