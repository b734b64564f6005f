"""Handling of standard input, output and error, which may be closed, on a full disk, or without a reader."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO

from bamboo_core.complaints import complain, system_reason
from bamboo_core.names import EXIT_FAILED, EXIT_OK

SHOWN: Final = "bamboo.shown"  # the error handler for characters that a stream's encoding lacks


def prepare() -> None:
    """Prepare the standard streams at the start of a program, before it opens any file.

    A closed stream is opened on /dev/null: otherwise the next file would get its number. Output and error then accept
    any text: `_shown` encodes characters that their encoding lacks.
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
    """Error because standard output cannot be written, except if its reader has gone (BrokenPipeError)."""


class _Output(io.FileIO):
    """Standard output. A failed write raises OutputLost, which no other file raises, or BrokenPipeError.

    optional: after a failed write the program reports it once, discards all output, and goes on.
    """

    optional = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.optional:
                give_up(self)
                complain(f"standard output cannot be written ({system_reason(error)}): the job goes on without")
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputLost(error.errno, error.strerror) from None


def go_on_without_reader() -> None:
    """Let this program go on, instead of ending, when its standard output can no longer be written."""
    _Output.optional = True


def _shown(error: UnicodeError) -> tuple[bytes, int]:
    """Return bytes for characters that an encoding lacks, and the position after them (a codecs error handler). The
    bytes: a file name's own, else UTF-8 if the encoding is ASCII, as without a locale, else a backslash escape.
    """
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


def give_up(stream: TextIO | io.FileIO) -> None:
    """Redirect a stream to /dev/null, so that its buffer and everything written from now on are discarded without
    errors.
    """
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
    """Flush the stream. If that fails, give it up (`give_up`) and return the error."""
    try:
        stream.flush()
    except OSError as error:
        give_up(stream)
        return error
    return None


def exit_of(main: Callable[[], int]) -> int:
    """Prepare the standard streams, run a program, flush them (`end`), and return its exit code. A failed write of
    standard output ends the program: with EXIT_FAILED, or with EXIT_OK if the reader stopped reading.
    """
    prepare()
    try:
        return end(main())
    except OutputLost as error:
        return end(EXIT_FAILED, error)
    except BrokenPipeError:
        give_up(sys.stdout)
        return EXIT_OK
