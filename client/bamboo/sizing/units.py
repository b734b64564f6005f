"""Readable units of time and money: seconds to hours, cents and USD. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableUnit:
    """A unit in which hours or USD are printed."""

    name: str  # as it is printed
    of_one: float = 1.0  # units in one hour, or in one USD

    def number(self, value: float, deviation: float | None = None) -> str:
        """Format hours or USD in this unit, with a deviation if there is one; a dash if not finite."""
        if not math.isfinite(value):
            return "-"
        mean = value * self.of_one
        digits = 0 if mean >= 1000 else 1 if mean >= 10 else 2
        spread = "" if deviation is None else f" ± {deviation * self.of_one:.{digits}f}"
        return f"{mean:.{digits}f}{spread}"

    def say(self, value: float) -> str:
        return f"{self.number(value)} {self.name}"


SECONDS: Final = ReadableUnit(name="s", of_one=3600.0)
MINUTES: Final = ReadableUnit(name="min", of_one=60.0)
HOURS: Final = ReadableUnit(name="h")
CENTS: Final = ReadableUnit(name="cents", of_one=100.0)
USD: Final = ReadableUnit(name="USD")


def time_unit(hours: Iterable[float]) -> ReadableUnit:
    """Return the unit for the shortest time that is positive and finite; HOURS if there is none."""
    shortest = _least(hours)
    return SECONDS if shortest < 2 / 60 else MINUTES if shortest < 1 else HOURS


def money_unit(usd: Iterable[float]) -> ReadableUnit:
    """Return the unit for the least amount that is positive and finite; USD if there is none."""
    return CENTS if _least(usd) < 0.5 else USD


def _least(values: Iterable[float]) -> float:
    return min((value for value in values if 0 < value < math.inf), default=math.inf)
