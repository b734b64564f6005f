"""What the two ends of a link say to each other about one-sided writes; pure, but for `receive_landing`.

The receiver sends its landing when the first such body is announced, and TAKEN for each slot that it has emptied. The
sender sends FILLED for each chunk that is written. Chunks fill the slots in turn, all of SLOT_BYTES but the last one
of a body. No byte is trusted.
"""

import socket
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from bamboo_trainer.transport import sockets, wire
from bamboo_trainer.transport.one_sided.contract import Bytes

FILLED = b"\x46"
TAKEN = b"\x54"
LENGTH = struct.Struct("<I")
MAX_LANDING = 256 << 10


def encode_landing(landing: bytes) -> bytes:
    return LENGTH.pack(len(landing)) + landing


def receive_landing(sock: socket.socket) -> bytes:
    """Raises OSError, WireError."""
    length: int = LENGTH.unpack(sockets.receive(sock, LENGTH.size))[0]
    if not 0 < length <= MAX_LANDING:
        raise wire.WireError(f"a landing of {length} bytes")
    return bytes(sockets.receive(sock, length))


def chunks(views: Sequence[wire.Buffer], size: int) -> Iterator[list[memoryview]]:
    """The bytes of all of them in order, `size` at a time."""
    chunk: list[memoryview] = []
    room = size
    for buffer in views:
        view = memoryview(buffer)
        while len(view):
            chunk.append(view[:room])
            view = view[room:]
            room -= len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def gather(chunk: Sequence[memoryview], slot: Bytes) -> int:
    """Copy a chunk into a slot, without Python's lock; how many bytes."""
    end = 0
    for piece in chunk:
        start, end = end, end + len(piece)
        np.copyto(slot[start:end], np.frombuffer(piece, np.uint8))
    return end


def scatter(slot: Bytes, chunk: Sequence[memoryview]) -> None:
    """Copy a slot's first bytes into a chunk, without Python's lock."""
    end = 0
    for piece in chunk:
        start, end = end, end + len(piece)
        np.copyto(np.frombuffer(piece, np.uint8), slot[start:end])
