"""Messages between a Python program and the processes that it starts for its jobs: pickled objects over two pipes.

Both ends are the same program of the same user, so what is read is trusted.
"""

import os
import pickle
import struct
import threading
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

_HEAD: Final = struct.Struct(">Q")


def packed(message: object) -> bytes:
    """The message with its length before it. Raises what pickle raises, PicklingError above all."""
    body = pickle.dumps(message)
    return _HEAD.pack(len(body)) + body


async def received(reader: StreamReader) -> Any:
    """The next message. Raises EOFError if the other end is closed."""
    try:
        (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return pickle.loads(await reader.readexactly(size))
    except IncompleteReadError:
        raise EOFError from None


class Channel:
    """The end of the process that was started. Any of its threads may send."""

    def __init__(self, reading: BinaryIO, writing: BinaryIO) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()

    @classmethod
    def of_standard_streams(cls) -> "Channel":
        """Takes the place of standard input and output: what is printed goes to standard error from now on."""
        reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(reading, writing)

    def send(self, message: object) -> None:
        """Raises BrokenPipeError if the other end is closed."""
        body = packed(message)
        with self._lock:
            self._writing.write(body)
            self._writing.flush()

    def receive(self) -> Any:
        """The next message. Raises EOFError if the other end is closed."""
        head = self._reading.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise EOFError
        (size,) = _HEAD.unpack(head)
        body = self._reading.read(size)
        if len(body) < size:
            raise EOFError
        return pickle.loads(body)

    def messages(self) -> Iterator[Any]:
        """All messages until the other end is closed."""
        while True:
            try:
                yield self.receive()
            except EOFError:
                return
