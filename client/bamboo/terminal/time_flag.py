"""Parser of durations in flags. Each `bamboo` command imports this module, so it imports nothing heavy."""

import math
import re

import typer

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_SECONDS = 366 * 86400.0


def seconds(text: str) -> float:
    """Return the seconds of a duration such as 30, 30s, 5m, 1.5h or 2d. Raises BadParameter, also above 366 days."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd]?)", str(text).strip())
    value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not value <= LONGEST_SECONDS:
        raise typer.BadParameter(f"{text!r}: expected a time such as 30s, 5m or 1h")
    return value
