"""Messages of the control channel to bytes and back, strictly checked."""

from typing import Any, TypeVar

import msgspec

from bamboo.control.protocol import Message, ToCoordinator, ToWorker

MAX_MESSAGE_BYTES = 4 << 20
T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[ToCoordinator] = msgspec.json.Decoder(ToCoordinator)
_from_coordinator: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    """JSON. What is no text, such as a file's name that is not UTF-8, is written as its escapes."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_escaped(msgspec.to_builtins(message)))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in value]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in value.items()}
    return value


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
