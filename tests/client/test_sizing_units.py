"""Readable units of time and money."""

import math

import pytest

from bamboo.sizing.units import CENTS, HOURS, MINUTES, SECONDS, USD, ReadableUnit, money_unit, time_unit


@pytest.mark.parametrize(
    ("hours", "unit"),
    [((0.001, 5.0), SECONDS), ((0.5, 2.0), MINUTES), ((1.0, math.inf), HOURS), ((0.0,), HOURS), ((), HOURS)],
)
def test_the_shortest_time_is_easily_read(hours: tuple[float, ...], unit: ReadableUnit) -> None:
    assert time_unit(hours) is unit


def test_little_money_is_told_in_cents() -> None:
    assert money_unit((0.02, 3.0)) is CENTS
    assert money_unit((0.5, 3.0)) is USD
    assert CENTS.number(0.0234, 0.001) == "2.34 ± 0.10"
    assert HOURS.say(math.inf) == "- h"
