"""Messages of the control channel to bytes and back, strictly checked."""

from typing import TypeVar

import msgspec

from bamboo.control.protocol import Message, ToCoordinator, ToWorker

MAX_MESSAGE_BYTES = 4 << 20
T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[ToCoordinator] = msgspec.json.Decoder(ToCoordinator)
_from_coordinator: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_worker(data: bytes | str) -> ToCoordinator:
    """Raises ValueError naming what is wrong."""
    return _decode(_from_worker, data)


def decode_from_coordinator(data: bytes | str) -> ToWorker:
    """Raises ValueError naming what is wrong."""
    return _decode(_from_coordinator, data)


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes | str) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"malformed message: {error}") from None
