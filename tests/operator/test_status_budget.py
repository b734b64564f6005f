"""A job's budget: suspension once it is spent, and warnings when it will not suffice."""

from decimal import Decimal

import pytest

from bamboo_core.job.api_object import written
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.writer import StatusWriter
from operator_kit import job, said
from status_kit import conditions, facts, seen

POOLS = [{"name": "spot", "pricePerHour": "2"}]
BUDGETED = job(nodePools=POOLS, budget={"money": "10"})


def test_a_job_that_has_cost_its_budget_is_suspended_and_says_why():
    status = seen(said(), spec=BUDGETED, cost=Decimal("10"))
    assert status["state"] == "Suspended"
    found = conditions(status)["Suspended"]
    assert (found["reason"], found["status"]) == ("BudgetSpent", "True")
    assert "the job begins anew, since it keeps no checkpoints" in found["message"]
    keeping = job(nodePools=POOLS, budget={"money": "10"}, checkpoint={"storage": "s3://bucket/x"})
    kept = conditions(seen(said(), spec=keeping, cost=Decimal("10.01")))["Suspended"]
    assert "the job goes on from its newest checkpoint" in kept["message"]
    less = seen(said(), spec=BUDGETED, cost=Decimal("9.99"), pods={"spot": 2})
    assert less["state"] == "Running"


def test_a_job_that_is_suspended_by_its_user_says_so():
    spec = job(nodePools=POOLS, budget={"money": "10"}, suspend=True)
    assert conditions(seen(None, spec=spec, cost=Decimal("10.01")))["Suspended"]["reason"] == "Suspended"


# warnings


def going_on(left, **more):
    """Return the status of a running job. left: seconds until its last step; None if unknown."""
    return said(eta_seconds=left, **more)


DATED = job(budget={"doneBy": "2026-03-01T14:00:00Z"})  # in two hours
PASSED = job(budget={"doneBy": "2026-03-01T11:00:00Z"})


@pytest.mark.parametrize(
    ("spec", "status", "cost", "reason"),
    [
        (job(nodePools=POOLS), going_on(60.0), "1", "NoBudget"),
        (BUDGETED, going_on(90_000.0), "1", "WithinBudget"),  # nobody foresees what it will cost in all
        (BUDGETED, going_on(90_000.0), "8", "MoneyLow"),
        (BUDGETED, going_on(60.0), "9.5", "WithinBudget"),  # its last minute is paid for
        (BUDGETED, going_on(None, steps=None), "8", "MoneyLow"),
        (BUDGETED, going_on(None), "1", "WithinBudget"),
        (BUDGETED, said(phase="Pending", grid=()), "9", "NotRunning"),
        (DATED, going_on(7000.0), "0", "WithinBudget"),
        (DATED, going_on(7300.0), "0", "DateMissed"),
        (DATED, going_on(None), "0", "WithinBudget"),
        (PASSED, going_on(7000.0), "0", "DateMissed"),
        (PASSED, going_on(0.0), "0", "WithinBudget"),
        (job(budget={"doneBy": "2026-03-01T14:00:00Z"}, suspend=True), going_on(7300.0), "0", "Suspended"),
    ],
)
def test_a_budget_that_is_too_small_is_a_condition(spec, status, cost, reason):
    found = conditions(seen(status, spec=spec, cost=Decimal(cost), pods={"spot": 2}))["BudgetShort"]
    assert (found["reason"], found["status"]) == (reason, str(reason in ("MoneyLow", "DateMissed")))


def test_a_date_stays_missed_until_it_is_known_again_how_long_the_rest_takes():
    missed = seen(going_on(7300.0), spec=DATED)
    again = conditions(seen(going_on(None), missed, spec=DATED))["BudgetShort"]
    assert (again["reason"], again["status"]) == ("DateMissed", "True")
    assert conditions(seen(going_on(None), missed, spec=BUDGETED))["BudgetShort"]["status"] == "False"
    assert conditions(seen(going_on(60.0), missed, spec=DATED))["BudgetShort"]["status"] == "False"


class Storing:
    """An API server that accepts every status."""

    async def write_status(self, *_):
        return None


async def test_a_user_is_warned_when_the_condition_begins_and_of_nothing_twice():
    writer = StatusWriter(JobIdentity(("ns", "job"), "uid"), {}, Storing())
    told = []
    for cost, left in (("2", 90_000.0), ("8", 90_000.0), ("8.1", 80_000.0), ("8.2", None)):
        known = facts(spec=BUDGETED, cost=Decimal(cost), pods={"spot": 2})
        await writer.write(known, going_on(left, step=int(Decimal(cost))))
        told.append([(one.reason, one.warning) for one in writer.take_warnings()])
    assert told == [[], [("MoneyLow", True)], [], []]
    found = written(writer.written)
    later = StatusWriter(JobIdentity(("ns", "job"), "uid"), found, Storing())
    known = facts(spec=BUDGETED, cost=later.earlier_cost + Decimal("0.1"), pods={"spot": 2})
    await later.write(known, going_on(None))
    assert later.take_warnings() == [], "also of an operator that comes later"
