"""Bamboo's own files of JSON, each of which says its format and that format's version."""

from typing import Protocol, TypeVar

import msgspec


class Versioned(Protocol):
    """What such a file holds."""

    @property
    def format(self) -> str: ...

    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


def decode_versioned(
    decoder: msgspec.json.Decoder[V],
    path: str,
    text: bytes | str,
    *,
    what: str,
    expected: tuple[str, int],
    error: type[Exception],
) -> V:
    """The content of a text. path: for messages; what: the content in words. expected: format and version. Raises that
    error, which names the path and says what was expected.
    """
    try:
        found = decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise error(f"{path}: no {what}: {wrong}") from None
    if (found.format, found.version) != expected:
        told = f"{found.format!r} version {found.version}"[:60]
        raise error(f"{path}: expected format {expected[0]!r} version {expected[1]}; found {told}")
    return found
