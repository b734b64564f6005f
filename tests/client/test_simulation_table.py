"""Tables of figures in terminals of any width."""

import io
import json
import math
from dataclasses import fields
from typing import Any

import pytest
from rich.console import Console, Group

from bamboo.simulation.figures import Spread
from bamboo.simulation.job.job_record import Series
from bamboo.terminal.simulation_table import COLUMNS, simulation_json, simulation_table


def printed(group: Group, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, soft_wrap=True, color_system=None).print(group)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("cases", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [60, 80, 120, 200, 1000])
def test_a_table_fits_the_terminal_and_lacks_nothing(cases: int, width: int) -> None:
    mean = {name: 100.0 + number for number, name in enumerate(COLUMNS)}
    one = Spread(runs=5, mean=mean, deviation=dict.fromkeys(COLUMNS, 1.25))
    lines = printed(simulation_table([(f"0.{case + 1}", one) for case in range(cases)], width), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for number, name in enumerate(COLUMNS):
        assert COLUMNS[name][0] in text
        assert text.count(f"{100 + number}") >= cases
    assert not any("…" in line for line in lines)


def test_what_is_not_known_is_no_number() -> None:
    """An unknown figure, such as `value` without prices, is a dash in the table and null in JSON."""
    mean = {"throughput": 1.5, "value": math.nan}
    found = Spread(runs=2, mean=mean, deviation={"throughput": 0.5, "value": math.nan})
    assert printed(simulation_table([("0.1", found)]), 80)[1].split() == ["0.1", "2", "1.50", "±", "0.50", "–"]
    over_time: Any = {field.name: (math.nan, math.nan) for field in fields(Series)}
    series = Series(**{**over_time, "hours": (1.0, 2.0)})
    (document,) = json.loads(simulation_json([("0.1", found)], [[series]]))
    assert document["mean"]["value"] is document["deviation"]["value"] is None
