"""Messages between a Python program and the processes of its jobs: pickled objects over two pipes.

Both ends are the same program of the same user, so they trust each other's messages.
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
    """Return the pickled message, preceded by its length. Raises pickle's errors, above all PicklingError."""
    body = pickle.dumps(message)
    return _HEAD.pack(len(body)) + body


async def received(reader: StreamReader) -> Any:
    """Read the next message. Raises EOFError if the other end is closed."""
    try:
        (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return pickle.loads(await reader.readexactly(size))
    except IncompleteReadError:
        raise EOFError from None


class Channel:
    """The channel's end in the started process. Any thread may send."""

    def __init__(self, reading: BinaryIO, writing: BinaryIO) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()

    @classmethod
    def of_standard_streams(cls) -> "Channel":
        """Take over standard input and output; from now on, prints go to standard error."""
        reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(reading, writing)

    def send(self, message: object) -> None:
        """Send a message. Raises BrokenPipeError if the other end is closed."""
        body = packed(message)
        with self._lock:
            self._writing.write(body)
            self._writing.flush()

    def receive(self) -> Any:
        """Read the next message. Raises EOFError if the other end is closed."""
        head = self._reading.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise EOFError
        (size,) = _HEAD.unpack(head)
        body = self._reading.read(size)
        if len(body) < size:
            raise EOFError
        return pickle.loads(body)

    def messages(self) -> Iterator[Any]:
        """Yield messages until the other end is closed."""
        while True:
            try:
                yield self.receive()
            except EOFError:
                return
