"""JSON files of Bamboo, which name their format and its version."""

from typing import Protocol, TypeVar

import msgspec


class Versioned(Protocol):
    """The content of such a file."""

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
    """Return the content of a text. path: for messages; what: the content in words. expected: format and version.
    Raises the given error, which names the path and the expected value.
    """
    try:
        found = decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise error(f"{path}: no {what}: {wrong}") from None
    if (found.format, found.version) != expected:
        told = f"{found.format!r} version {found.version}"[:60]
        raise error(f"{path}: expected format {expected[0]!r} version {expected[1]}; found {told}")
    return found
