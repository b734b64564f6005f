"""What the two ends of a link say to each other about one-sided writes; pure, but for `receive_landing`.

The receiver sends its landing when the first such body is announced, and TAKEN for each slot that it has emptied. The
sender sends FILLED for each chunk that is written. Chunks fill the slots in turn, all of SLOT_BYTES but the last one
of a body. No byte is trusted.
"""

import socket
import struct
from collections.abc import Iterator, Sequence

from torch import Tensor

from bamboo_trainer.frames.tensors import flat_bytes
from bamboo_trainer.transport import sockets, wire

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


def chunks(parts: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The bytes of these contiguous tensors in order, `size` at a time, as uint8 of one dimension."""
    chunk: list[Tensor] = []
    room = size
    for part in parts:
        view = flat_bytes(part)
        while len(view):
            chunk.append(view[:room])
            view = view[room:]
            room -= len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk
