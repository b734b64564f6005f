"""How far a budget gets, and what is said of it."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bamboo.cli.commands import app
from bamboo_core.control import protocol
from bamboo_core.control.channel_events import WorkerJoined
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import TimeTold
from bamboo_core.coordinator.grids.dates import time_told
from bamboo_core.coordinator.job_status import status
from bamboo_core.job.budget_reach import Pace, date_reach, money_reach, of_manifest, past, shown_date, span
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import to_json
from job_simulation_kit import job
from manifest_kit import bamboojob, minimal, problems

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
DATE = "done by 2026-12-01 14:00 UTC"
TWO_HOURS = NOW + timedelta(hours=2)


@pytest.mark.parametrize(
    ("pace", "told"),
    [
        ((10, 100, 60.0), f"{DATE}: 30 min before it at the present rate"),
        ((10, 100, 160.0), f"{DATE}: 2.0 h late at the present rate, with 55 of 100 steps done by then"),
        ((10, 100, None), f"{DATE}, in 2.0 h: whether it will be is not known yet"),
        ((10, None, 60.0), f"{DATE}, in 2.0 h: whether it will be is not known yet"),
        ((100, 100, 60.0), f"{DATE}: all steps are done"),
    ],
)
def test_it_is_said_whether_the_date_is_met(pace: tuple[int, int | None, float | None], told: str) -> None:
    step, steps, seconds = pace
    assert date_reach(TWO_HOURS, NOW, Pace(step=step, steps=steps, step_seconds=seconds)).told == told


def test_a_date_that_has_passed_says_how_much_is_missing() -> None:
    found = date_reach(NOW - timedelta(minutes=5), NOW, Pace(step=10, steps=70, step_seconds=60.0))
    assert found.told == (
        "done by 2026-12-01 11:55 UTC: 5 min ago, with 10 of 70 steps done; the rest takes 1.0 h more"
        " at the present rate"
    )
    assert found.late == 65 * 60
    late = date_reach(NOW - timedelta(minutes=5), NOW, Pace(step=70, steps=70, step_seconds=60.0))
    assert late.told.endswith("all steps are done")


def test_money_says_what_it_pays_for() -> None:
    found = money_reach(Decimal(10), Decimal(4), Decimal(2), Pace(step=0, steps=100, step_seconds=360.0))
    assert (found.hours, found.steps, found.left, found.enough) == (3.0, 30, 100, False)
    assert found.told == "4.00 of 10 spent; the rest lasts 3.0 h at 2 an hour, about 30 of the 100 steps that are left"
    assert money_reach(Decimal(10), Decimal(4), None, Pace(step=0, steps=9, step_seconds=1.0)).enough is None


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(40, "40 s"), (720, "12 min"), (7560, "2.1 h"), (200_000, "2.3 days"), (-3, "0 s")],
)
def test_a_span_is_as_exact_as_an_estimate(seconds: float, told: str) -> None:
    assert span(seconds) == told


def test_dates_are_shown_in_one_zone() -> None:
    assert shown_date(datetime.fromisoformat("2026-12-24T18:00:30+05:30")) == "2026-12-24 12:30:30 UTC"


def dated(date: str) -> dict[str, object]:
    return bamboojob(**minimal()["spec"], budget={"doneBy": date})


@pytest.mark.parametrize(
    "date", ["tomorrow", "2026-12-24", "2026-12-24T18:00:00", "2026-02-29T00:00:00Z", "2026-12-24T24:00:00Z", 7]
)
def test_what_is_no_date_is_refused_in_a_sentence(date: object) -> None:
    (problem,) = problems(bamboojob(**minimal()["spec"], budget={"doneBy": date}))
    assert problem.startswith(
        "spec.budget.doneBy: expected a date and time of this century with its zone (RFC 3339) such as"
        " 2026-12-24T18:00:00Z, got "
    )


def test_a_date_in_the_past_is_a_warning() -> None:
    spec = parse_manifest(dated("2026-12-01T12:00:00Z"))
    assert past(spec, NOW - timedelta(seconds=1)) == ""
    assert past(spec, NOW).startswith("spec.budget.doneBy: 2026-12-01 12:00 UTC has passed; the job runs all the same")
    assert past(parse_manifest(bamboojob(**minimal()["spec"])), NOW) == ""


def test_the_coordinator_knows_the_time_once_it_is_told() -> None:
    document = dated("2026-12-01T14:00:00Z")
    state = coordinator.initial(parse_manifest(document), document, secret="", save_path=None, now=1000.0)
    assert status(state, 1000.0).date is None
    told = time_told(state, NOW, 1000.0)
    assert told == TimeTold(NOW)
    state, _ = coordinator.step(state, told, 1000.0)
    found = status(state, 1060.0).date
    assert found is not None
    assert found.seconds == 7200 - 60
    assert time_told(state, NOW + timedelta(seconds=60), 1060.0) is None
    assert time_told(state, NOW + timedelta(seconds=63), 1060.0) is not None, "its clock stood still for a while"


def test_nobody_tells_the_time_to_a_job_without_a_date() -> None:
    document = bamboojob(**minimal()["spec"])
    state = coordinator.initial(parse_manifest(document), document, secret="", save_path=None, now=0.0)
    state, _ = coordinator.step(state, WorkerJoined(protocol.Hello(worker="w0", host="h", port=1)), 0.0)
    assert time_told(state, NOW, 0.0) is None
    assert status(state, 0.0).date is None


def test_a_manifest_says_how_far_its_budget_gets() -> None:
    """Two workers of 2 an hour, and ten steps."""
    spec = minimal()["spec"] | {
        "nodePools": [{"name": "spot", "pricePerHour": "2"}, {"name": "b", "pricePerHour": "9"}]
    }
    budget = {"money": "8", "doneBy": "2026-12-01T14:00:00Z"}
    job = parse_manifest(bamboojob(**spec, budget=budget))
    assert of_manifest(job, NOW) == [
        "spec.budget.money with all 2 workers in pool spot: 0.00 of 8 spent; the rest lasts 2.0 h at 4 an hour",
        f"spec.budget.doneBy: {DATE}, in 2.0 h: whether it will be is not known yet",
    ]
    assert of_manifest(job, NOW, 900.0) == [
        "spec.budget.money with all 2 workers in pool spot: 0.00 of 8 spent; the rest lasts 2.0 h at 4 an hour,"
        " about 8 of the 10 steps that are left",
        f"spec.budget.doneBy: {DATE}: 30 min late at the present rate, with 8 of 10 steps done by then",
    ]
    value = {"objective": "Value", "maxWorkers": 6, "maxStages": 3}
    hourly = parse_manifest(bamboojob(**spec, elastic=value, budget={"moneyPerHour": "7"}))
    (told,) = of_manifest(hourly, NOW)
    assert told == "spec.budget.moneyPerHour 7 pays for 3 of at most 6 workers in pool spot"
    assert of_manifest(parse_manifest(bamboojob(**minimal()["spec"])), NOW) == []


def test_validate_tells_of_the_budget(tmp_path: Path) -> None:
    """A step takes about a quarter of a second."""
    one = job(3, nodePools=[{"name": "spot", "pricePerHour": "2"}], budget={"money": "6"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(one.manifest))
    (tmp_path / "profile.json").write_bytes(to_json(one.profile))
    command = ["validate", str(tmp_path / "job.yaml")]
    plain = CliRunner().invoke(app, command)
    assert plain.exit_code == 0, plain.output
    assert (
        "spec.budget.money with all 3 workers in pool spot: 0.00 of 6 spent; the rest lasts 1.0 h at 6 an"
        in plain.output
    )
    more = CliRunner().invoke(app, [*command, "--profile", str(tmp_path / "profile.json")])
    assert more.exit_code == 0, more.output
    assert " of the 100000 steps that are left" in more.output
    wrong = CliRunner().invoke(app, [*command, "--profile", "nothing.json"])
    assert wrong.exit_code == 2
    assert "cannot read the profile nothing.json" in wrong.output
