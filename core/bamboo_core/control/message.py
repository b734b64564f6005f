"""What all messages of the control channel have in common (`protocol`)."""

from typing import Annotated, Any

import msgspec

MOST = 1 << 53  # of what is counted: every reader of JSON knows such a number
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


def _as_text(value: object) -> str:
    """The text of an object that JSON does not know; only subclasses of text have one. Raises TypeError for any
    other.
    """
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.json.Encoder(enc_hook=_as_text)


def to_json(value: Any) -> bytes:
    """What is no text, such as a file's name that is not UTF-8, is written as its escapes."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_escaped(msgspec.to_builtins(value)))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list() | tuple():
            return [_escaped(one) for one in value]
        case dict():
            return {_escaped(key): _escaped(one) for key, one in value.items()}
    return value
