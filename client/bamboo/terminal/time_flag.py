"""A time as a flag's value. Imported at every start: nothing heavy here."""

import math
import re

import typer

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_SECONDS = 366 * 86400.0


def seconds(text: str) -> float:
    """30, 30s, 5m, 1.5h, 2d."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd]?)", str(text).strip())
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not value <= LONGEST_SECONDS:
        raise typer.BadParameter(f"{text!r}: expected a time such as 30s, 5m or 1h")
    return value
