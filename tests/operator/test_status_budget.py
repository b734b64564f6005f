"""How far a job's budget gets, for a person."""

from datetime import timedelta
from decimal import Decimal

import pytest

from bamboo_core.job.budget_reach import Pace, date_reach
from bamboo_core.job.status import read_status
from bamboo_operator.status.budget import budget_left, suspends, warnings
from bamboo_operator.status.document import rule_input
from operator_kit import NOW, at, job, said
from status_kit import conditions, facts, seen

POOLS = [{"name": "spot", "pricePerHour": "2"}]
SPENT = "1.50 of 10 spent; the rest lasts 2.1 h at 4 an hour"
BUDGETED = job(nodePools=POOLS, budget={"money": "10"})


@pytest.mark.parametrize(
    ("total", "per_hour", "status", "told"),
    [
        ("1.5", "4", said(step_seconds=3600.0), f"{SPENT}, about 2 of the 7 steps that are left"),
        ("1.5", "4", said(), f"{SPENT}, enough for the 7 steps that are left"),
        ("1.5", "4", said(steps=None, step_seconds=1800.0), f"{SPENT}, about 4 steps"),
        ("1.5", "4", None, SPENT),
        ("1.5", None, None, "1.50 of 10 spent"),
        ("10.2", "4", None, "10.20 of 10 spent"),
    ],
)
def test_it_is_said_how_far_the_rest_gets(total, per_hour, status, told):
    known = facts(spec=BUDGETED, cost=Decimal(total))
    assert budget_left(known, None if per_hour is None else Decimal(per_hour), status) == told


def test_nothing_is_said_without_a_budget_for_the_job():
    assert budget_left(facts(spec=job(), cost=Decimal(1)), Decimal(1), said()) is None


def test_a_job_that_has_cost_its_budget_is_suspended_and_says_why():
    status = seen(said(), spec=BUDGETED, cost=Decimal("10.01"))
    assert status["state"] == "Suspended"
    found = conditions(status)["Suspended"]
    assert (found["reason"], found["status"]) == ("BudgetSpent", "True")
    assert "the job begins anew, since it keeps no checkpoints" in found["message"]
    keeping = job(nodePools=POOLS, budget={"money": "10"}, checkpoint={"storage": {"uri": "s3://bucket/x"}})
    kept = conditions(seen(said(), spec=keeping, cost=Decimal("10.01")))["Suspended"]
    assert "the job goes on from its newest checkpoint" in kept["message"]
    less = seen(said(), spec=BUDGETED, cost=Decimal("9.99"), pods={"spot": 2})
    assert less["state"] == "Running"
    assert less["cost"]["budget"].startswith("9.99 of 10 spent; the rest lasts 0.0 h at 4 an hour")


@pytest.mark.parametrize(
    ("cost", "phase", "suspended"),
    [("10", "Running", True), ("10", "Pending", True), ("9.99", "Running", False), ("11", "Saving", False)],
)
def test_money_suspends_a_job_unless_it_saves_its_result(cost, phase, suspended):
    why = suspends(facts(spec=BUDGETED, cost=Decimal(cost)), phase)
    assert bool(why) == suspended
    assert not suspended or "spec.budget.money" in why
    assert suspends(facts(spec=job(), cost=Decimal(cost)), phase) == ""


def test_a_job_that_is_suspended_by_its_user_says_so():
    spec = job(nodePools=POOLS, budget={"money": "10"}, suspend=True)
    assert conditions(seen(None, spec=spec, cost=Decimal("10.01")))["Suspended"]["reason"] == "Suspended"


def test_a_job_that_holds_what_is_worth_its_price_lacks_nothing():
    """Its topology has four workers; two of them are given back."""
    topology = {"stages": 2, "pipelines": 2}
    spec = job(topology=topology, elastic={"objective": "Value"})
    found = conditions(seen(said(wanted=2), spec=spec))
    assert found["WorkersReady"]["status"] == "True"
    assert found["Degraded"]["status"] == "False"
    assert seen(said(wanted=2), spec=spec)["workers"]["desired"] == 2


# warnings


def dated(hours: float, step_seconds: float = 600.0, step: int = 4):
    """Of ten steps; so many hours before the date."""
    pace = Pace(step=step, steps=10, step_seconds=step_seconds)
    found = date_reach(NOW + timedelta(hours=hours), NOW, pace)
    return said(step=step, step_seconds=step_seconds, date=found)


DATED = job(budget={"doneBy": "2026-03-01T14:00:00Z"})


@pytest.mark.parametrize(
    ("spec", "status", "cost", "reason"),
    [
        (job(nodePools=POOLS), said(), "1", "NoBudget"),
        (BUDGETED, said(step_seconds=60.0), "1", "WithinBudget"),
        (BUDGETED, said(step_seconds=3600.0), "1", "MoneyShort"),
        (BUDGETED, said(step_seconds=1800.0), "8", "MoneyLow"),
        (BUDGETED, said(step_seconds=60.0), "9.5", "WithinBudget"),  # its seven minutes are paid for
        (BUDGETED, said(steps=None, step_seconds=60.0), "8", "MoneyLow"),
        (BUDGETED, said(step_seconds=None), "1", "WithinBudget"),
        (BUDGETED, said(phase="Pending", grid=((),)), "9", "NotRunning"),
        (DATED, dated(2.0), "0", "WithinBudget"),
        (DATED, dated(0.5), "0", "DateMissed"),
        (DATED, dated(-1.0), "0", "DateMissed"),
        (DATED, dated(-1.0, step=10), "0", "WithinBudget"),
        (job(budget={"doneBy": "2026-03-01T14:00:00Z"}, suspend=True), dated(0.5), "0", "Suspended"),
    ],
)
def test_a_budget_that_is_too_small_is_a_condition(spec, status, cost, reason):
    found = conditions(seen(status, spec=spec, cost=Decimal(cost), pods={"spot": 2}))["BudgetShort"]
    assert (found["reason"], found["status"]) == (reason, str(reason in ("MoneyShort", "MoneyLow", "DateMissed")))


def test_a_budget_is_short_until_it_clearly_suffices():
    def short(step_seconds, previous):
        status = said(step_seconds=step_seconds)
        return seen(status, previous, spec=BUDGETED, cost=Decimal(2), pods={"spot": 2})

    once = 7200 / 7  # seconds of a step with which the money is just enough
    assert conditions(short(1.01 * once, {}))["BudgetShort"]["status"] == "False"
    found = short(1.03 * once, {})
    assert conditions(found)["BudgetShort"]["status"] == "True"
    assert conditions(short(0.99 * once, found))["BudgetShort"]["status"] == "True"
    assert conditions(short(0.97 * once, found))["BudgetShort"]["status"] == "False"


def warned(spec, status, previous, seconds, cost="2"):
    """The status that many seconds later, and the reasons of the events with it."""
    more = {"spec": spec, "cost": Decimal(cost), "pods": {"spot": 2}, "now": NOW + timedelta(seconds=seconds)}
    new = seen(status, previous, **more)
    before = read_status(previous)
    told = warnings(read_status(new), before, rule_input(status, before, facts(**more)).shortfalls())
    return new, [(one.reason, one.warning) for one in told], [one.message for one in told]


def test_a_user_is_warned_once_for_each_budget():
    slow = said(step_seconds=3600.0)
    first, told, _ = warned(BUDGETED, slow, {}, 0)
    assert told == [], "that may pass"
    second, told, messages = warned(BUDGETED, slow, first, 61)
    assert told == [("MoneyShort", True)]
    assert messages == [
        "spec.budget.money 10 is spent before the last step, at the present price and speed: 2.00 of 10 spent;"
        " the rest lasts 2.0 h at 4 an hour, about 2 of the 7 steps that are left"
    ]
    for previous, status in ((second, slow), (second, said(step_seconds=1.0)), (second, None)):
        now, told, _ = warned(BUDGETED, status, previous, 122)
        assert told == []
        assert now["budgetWarnings"] == ["MoneyShort 10"]
        assert warned(BUDGETED, slow, now, 400)[1] == [], "also of an operator that comes later"
    low, told, _ = warned(BUDGETED, slow, second, 500, cost="7")
    assert told == [("MoneyLow", True)]
    assert low["budgetWarnings"] == ["MoneyShort 10", "MoneyLow 10"]
    more = job(nodePools=POOLS, budget={"money": "11"})
    other, told, _ = warned(more, slow, low, 600, cost="7.5")
    assert told == [("MoneyLow", True), ("MoneyShort", True)]
    assert other["budgetWarnings"] == ["MoneyLow 11", "MoneyShort 11"]
    assert "budgetWarnings" not in warned(job(), slow, other, 700)[0]


def test_a_user_is_warned_of_a_date_that_will_be_missed():
    first, _, _ = warned(DATED, dated(0.5), {}, 0)
    _, told, messages = warned(DATED, dated(0.5), first, 61)
    assert told == [("DateMissed", True)]
    assert messages == [
        "done by 2026-03-01 12:30 UTC: 30 min late at the present rate, with 7 of 10 steps done by then"
    ]
    assert conditions(first)["BudgetShort"]["lastTransitionTime"] == at(0)
