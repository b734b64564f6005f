"""The base of the control channel's messages (`protocol`), and their JSON."""

from typing import Annotated, Any

import msgspec

MOST = 1 << 53  # bounds counts: every JSON reader represents it exactly
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


def _as_text(value: object) -> str:
    """Convert a subclass of str, which JSON does not know, to str. Raises TypeError for anything else."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.json.Encoder(enc_hook=_as_text)


def to_json(value: Any) -> bytes:
    """Return the value as JSON. Characters that UTF-8 cannot hold, such as in a file's name, are escaped."""
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
