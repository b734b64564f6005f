"""Digests of parts of a model's state, which add up to that of the whole."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # sha256 in hexadecimal


def add_digests(digests: Iterable[str]) -> str:
    """The sum of sha256 digests in hexadecimal, modulo 2**256: the same however the parts are put together."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**256:064x}"
