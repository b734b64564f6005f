"""How far a job's budget gets, for a person."""

from decimal import Decimal

import pytest

from bamboo_operator.status.budget import budget_left
from operator_kit import job, said
from status_kit import conditions, seen

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
)  # fmt: skip
def test_it_is_said_how_far_the_rest_gets(total, per_hour, status, told):
    assert budget_left(BUDGETED, Decimal(total), None if per_hour is None else Decimal(per_hour), status) == told


def test_nothing_is_said_without_a_budget_for_the_job():
    assert budget_left(job(), Decimal(1), Decimal(1), said()) is None


def test_a_job_that_has_cost_its_budget_is_suspended_and_says_why():
    status = seen(said(), spec=BUDGETED, cost=Decimal("10.01"))
    assert status["state"] == "Suspended"
    found = conditions(status)["Suspended"]
    assert (found["reason"], found["status"]) == ("BudgetSpent", "True")
    assert "with a larger spec.budget.money the job goes on" in found["message"]
    less = seen(said(), spec=BUDGETED, cost=Decimal("9.99"), pods={"spot": 2})
    assert less["state"] == "Running"
    assert less["cost"]["budget"].startswith("9.99 of 10 spent; the rest lasts 0.0 h at 4 an hour")


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
