"""Durations that users type as options, such as 30s or 1.5h."""

import pytest
import typer

from bamboo.terminal.time_flag import seconds


@pytest.mark.parametrize(("text", "value"), [("30", 30), ("30s", 30), ("1.5h", 5400), ("2d", 172800), ("0", 0)])
def test_a_time_is_read_in_every_unit(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "-1", "soon", "1y", "inf", "nan", "9" * 30, "400d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        seconds(text)
