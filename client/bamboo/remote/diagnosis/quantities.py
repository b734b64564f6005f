"""Kubernetes quantities as numbers."""

import re
from decimal import Decimal
from typing import Final

_FORM: Final = re.compile(r"([0-9.]+)(?:([eE][-+]?[0-9]+)|([numkMGTPE]i?|[KMGTPE]i)?)")
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = "KMGTPE"


def quantity(text: str | int) -> Decimal:
    """Parse a quantity: 500m is 0.5, and 2Ki is 2048. Raises ValueError."""
    match = _FORM.fullmatch(str(text))
    if match is None:
        raise ValueError(f'expected a Kubernetes quantity, such as 1, 500m or 16Gi, got "{text}"')
    number, exponent, suffix = match.groups()
    if exponent:
        return Decimal(f"{number}{exponent}")
    if suffix and suffix.endswith("i"):
        return Decimal(number) * Decimal(1024 ** (_BINARY.index(suffix[0]) + 1))
    return Decimal(number).scaleb(_DECIMAL[suffix]) if suffix else Decimal(number)
