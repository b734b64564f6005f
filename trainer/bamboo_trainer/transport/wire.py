"""The wire format of the TCP data plane: pure functions that encode frames and hellos, and parse untrusted bytes.

A frame is a fixed header, a msgpack meta `[[[dtype, shape], ...], payload]`, and the tensors' bytes one after the
other, in the machine's byte order (little-endian on x86 and Arm). The frame's number on the link comes before it, see
`links`. Received bytes that are out of bounds or inconsistent raise WireError; the reader then closes the link. The
module `frames`, not this one, checks that a frame has the tensors and the payload of its kind.
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch

from bamboo_core.names import DATA_PLANE_VERSION
from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import (
    BULK,
    DTYPE_NAMES,
    DTYPES,
    MAX_BODY,
    MAX_DIMENSIONS,
    NO_CELL,
    STATES,
    Address,
    Frame,
    FrameKind,
    byte_view,
    unsendable,
)

MAGIC: Final = b"BMBO"
VERSION: Final = DATA_PLANE_VERSION
MAX_META: Final = 16 << 20  # the names and shapes of a stage's whole state
MAX_HELLO: Final = 2048
NONCE_SIZE: Final = 16
COALESCE: Final = 64 << 10
ACCEPTED: Final = b"\x01"

NUMBER: Final = struct.Struct("<Q")  # counts the frames of a link from 0
# magic, version, kind, epoch, origin, pipeline, stage, step, microbatch, part, meta length, body length
HEADER: Final = struct.Struct("<4sBBqqiiqiiIQ")
HELLO_LENGTH: Final = struct.Struct("<H")

_KINDS: Final = {int(kind): kind for kind in FrameKind}

Buffer = bytes | memoryview


class WireError(Exception):
    """Error because received bytes violate the protocol, or a frame's tensors do not fit into memory."""


class Lane(StrEnum):
    """A class of frames with links of its own, so that no frame waits in a queue behind frames of another class."""

    BOUNDARY = "boundary"
    BULK = "bulk"
    STATE = "state"  # at a bounded rate, to leave the network to the other two


def lane_of(address: Address) -> Lane:
    """Return the lane of a frame. Requested layers go on the bulk lane, since training waits for them."""
    if address.kind in STATES and address.pipeline != NO_CELL:
        return Lane.STATE
    return Lane.BULK if address.kind in BULK | STATES else Lane.BOUNDARY


class Header(NamedTuple):
    address: Address
    epoch: int
    origin: int
    meta_length: int
    body_length: int


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of the tensor's data, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Meta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    tensors: list[tuple[str, tuple[int, ...]]]
    payload: Any


class LinkHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sender's first message on a connection: its name, the lane, and a proof that it knows the job's secret."""

    worker: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    lane: Lane
    # the nonce of the connection whose link this one joins; b"" for a new link
    joins: Annotated[bytes, msgspec.Meta(max_length=NONCE_SIZE)]
    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


_META_DECODER: Final = msgspec.msgpack.Decoder(_Meta)
_HELLO_DECODER: Final = msgspec.msgpack.Decoder(LinkHello)
_META_ERRORS: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


class Encoded(NamedTuple):
    """A frame ready to send. The frame's tensors that are contiguous in host memory are not copied.

    head: header and meta. parts: contiguous tensors in host memory, whose bytes follow. body_length: in bytes.
    """

    head: bytes
    parts: tuple[torch.Tensor, ...]
    body_length: int

    @property
    def size(self) -> int:
        """The size of the whole frame, in bytes."""
        return len(self.head) + self.body_length

    @property
    def buffers(self) -> list[Buffer]:
        """The bytes of the whole frame, in order."""
        return [self.head, *map(byte_view, self.parts)]


def encode_frame(frame: Frame) -> Encoded:
    """Encode a frame. Raises ValueError for an invalid tensor, number or size, TypeError for an invalid payload."""
    parts, specs, body_length = [], [], 0
    for tensor in frame.tensors:
        sendable = tensor.detach()  # the engine may set requires_grad on the tensor while it is sent
        if not (sendable.is_cpu and sendable.is_contiguous()):
            sendable = sendable.cpu().contiguous()
        name, size = DTYPE_NAMES.get(sendable.dtype), sendable.nbytes
        if name is None or sendable.dim() > MAX_DIMENSIONS:
            raise ValueError(f"{frame.address}: {unsendable(sendable)}")
        specs.append((name, tuple(sendable.shape)))
        if size:
            parts.append(sendable)
            body_length += size
    meta = msgspec.msgpack.encode(_Meta(specs, frame.payload))
    if len(meta) > MAX_META or body_length > MAX_BODY:
        raise ValueError(f"{frame.address}: too large: meta {len(meta)}, body {body_length} bytes")
    try:
        kind, *place = frame.address
        header = HEADER.pack(MAGIC, VERSION, kind, frame.epoch, frame.origin, *place, len(meta), body_length)
    except struct.error as error:
        raise ValueError(f"{frame.address}, epoch {frame.epoch}: {error}") from error
    return Encoded(header + meta, tuple(parts), body_length)


def parse_header(raw: bytes | bytearray) -> Header:
    """Parse a frame's header. Raises WireError."""
    if len(raw) != HEADER.size:
        raise WireError(f"a header of {len(raw)} bytes")
    magic, version, kind, epoch, origin, *place, meta, body = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"magic {magic!r}, version {version}")
    if meta > MAX_META or body > MAX_BODY:
        raise WireError(f"meta {meta}, body {body} bytes: too large")
    known = _KINDS.get(kind)
    if known is None:
        raise WireError(f"kind {kind}")
    return Header(Address(known, *place), epoch, origin, meta, body)


def parse_meta(raw: bytes | bytearray, body_length: int) -> tuple[tuple[TensorSpec, ...], Any]:
    """Return the tensors' specs and the payload. Raises WireError, also if the tensors do not fill the body."""
    try:
        meta = _META_DECODER.decode(raw)
    except _META_ERRORS as error:
        raise WireError(f"meta: {error}") from error
    specs = tuple([_spec(name, shape) for name, shape in meta.tensors])
    size = sum([spec.size for spec in specs])
    if size != body_length:
        raise WireError(f"tensors of {size} bytes in a body of {body_length}")
    return specs, meta.payload


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise WireError(f"dtype {name[:32]!r}")
    # With a zero among them, the other dimensions could still overflow the strides.
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or math.prod([d or 1 for d in shape]) > MAX_BODY:
        raise WireError(f"shape of {len(shape)} dimensions out of bounds")
    return TensorSpec(dtype, shape)


def coalesce(buffers: Iterable[Buffer], limit: int = COALESCE) -> Iterator[Buffer]:
    """Yield the buffers in order, with small ones joined into pieces of less than `limit` bytes."""
    small: list[Buffer] = []
    size = 0
    for buffer in buffers:
        if small and size + len(buffer) >= limit:
            yield b"".join(small)
            small, size = [], 0
        if len(buffer) >= limit:
            yield buffer
        else:
            small.append(buffer)
            size += len(buffer)
    if small:
        yield b"".join(small)


def _mac(secret: bytes, nonce: bytes, route: tuple[WorkerId, WorkerId, Lane], joins: bytes) -> bytes:
    # The MAC covers the receiver, so that a link to a port that another worker now has is refused.
    message = msgspec.msgpack.encode([*route, nonce, joins])
    return hmac.new(secret, message, hashlib.sha256).digest()


def encode_hello(
    secret: bytes, nonce: bytes, sender: WorkerId, receiver: WorkerId, lane: Lane, joins: bytes = b""
) -> bytes:
    """Encode the answer to the acceptor's nonce: a length, then the hello. joins: see LinkHello."""
    mac = _mac(secret, nonce, (sender, receiver, lane), joins)
    hello = LinkHello(worker=sender, lane=lane, joins=joins, mac=mac)
    raw = msgspec.msgpack.encode(hello)
    return HELLO_LENGTH.pack(len(raw)) + raw


def parse_hello_length(raw: bytes | bytearray) -> int:
    """Parse a hello's length. Raises WireError."""
    length: int = HELLO_LENGTH.unpack(raw)[0]
    if not 0 < length <= MAX_HELLO:
        raise WireError(f"a hello of {length} bytes")
    return length


def parse_hello(raw: bytes | bytearray, secret: bytes, nonce: bytes, receiver: WorkerId) -> LinkHello:
    """Parse and verify a hello. Raises WireError, also if the sender lacks the secret or means another receiver."""
    try:
        hello = _HELLO_DECODER.decode(raw)
        expected = _mac(secret, nonce, (hello.worker, receiver, hello.lane), hello.joins)
    except _META_ERRORS as error:
        raise WireError(f"hello: {error}") from error
    if not hmac.compare_digest(hello.mac, expected):
        raise WireError("hello: wrong mac")
    if hello.joins and len(hello.joins) != NONCE_SIZE:
        raise WireError(f"hello: joins has {len(hello.joins)} bytes")
    return hello
