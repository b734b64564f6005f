"""Reach of a job's budget: messages about its money and its deadline (`doneBy`)."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.job.budget_reach import (
    date_told,
    hours_left,
    of_manifest,
    past,
    seconds_late,
)
from bamboo_core.job.manifest import parse_manifest
from manifest_kit import bamboojob, minimal

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
DATE = "done by 2026-12-01 14:00 UTC"
TWO_HOURS = NOW + timedelta(hours=2)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (5400.0, f"{DATE}: 30 min before it at the present rate"),
        (14400.0, f"{DATE}: 2.0 h late at the present rate"),
        (None, f"{DATE}, in 2.0 h: whether it will be is not known yet"),
        (0.0, f"{DATE}: all steps are done"),
    ],
)
def test_it_is_said_whether_the_date_is_met(left: float | None, message: str) -> None:
    assert date_told(TWO_HOURS, NOW, left) == message
    late = seconds_late(TWO_HOURS, NOW, left)
    assert (late is not None and late > 0) == (" late " in message)


def test_a_date_that_has_passed_says_how_much_is_missing() -> None:
    before = NOW - timedelta(minutes=5)
    assert date_told(before, NOW, 3600.0) == (
        "done by 2026-12-01 11:55 UTC: 5 min ago; the rest takes 1.0 h more at the present rate"
    )
    assert seconds_late(before, NOW, 3600.0) == 65 * 60
    assert date_told(before, NOW, None).endswith(": 5 min ago")
    assert date_told(before, NOW, 0.0).endswith("all steps are done")
    assert date_told(None, NOW, 3600.0) == ""


def test_money_says_for_how_long_it_lasts() -> None:
    assert hours_left(Decimal(10), Decimal(4), Decimal(2)) == 3.0
    assert hours_left(Decimal(10), Decimal(4), None) is None


def dated(date: str) -> dict[str, object]:
    return bamboojob(**minimal()["spec"], budget={"doneBy": date})


def test_a_date_in_the_past_is_a_warning() -> None:
    spec = parse_manifest(dated("2026-12-01T12:00:00Z"))
    assert past(spec, NOW - timedelta(seconds=1)) == ""
    assert past(spec, NOW).startswith("spec.budget.doneBy: 2026-12-01 12:00 UTC has passed; the job runs all the same")
    assert past(parse_manifest(bamboojob(**minimal()["spec"])), NOW) == ""


def test_a_manifest_says_for_how_long_its_money_lasts(tmp_path: Path) -> None:
    """The message gives the hours that the money lasts: two workers at the first pool's price of 2 an hour each."""
    spec = minimal()["spec"] | {
        "nodePools": [{"name": "spot", "pricePerHour": "2"}, {"name": "b", "pricePerHour": "9"}]
    }
    document = bamboojob(**spec, budget={"money": "8"})
    message = "spec.budget.money: 8 lasts 2.0 h with all 2 workers in pool spot, at 4 an hour"
    assert of_manifest(parse_manifest(document)) == message
    assert of_manifest(parse_manifest(bamboojob(**minimal()["spec"]))) == ""
    assert of_manifest(parse_manifest(dated("2026-12-01T14:00:00Z"))) == ""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml")])
    assert done.exit_code == 0, done.output
    assert f"  {message}\n" in done.output
