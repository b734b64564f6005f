"""Digests of parts of a model's state, whose sum is the digest of the whole."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # sha256 in hexadecimal


def add_digests(digests: Iterable[str]) -> str:
    """Return the sum of sha256 digests in hexadecimal, modulo 2**256: the same in any order and grouping."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**256:064x}"
