"""What tenants have spent in a day and a month: no cost is lost or counted twice, whoever counts, and whatever ends."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_operator.tenants.spending import JobMoney, MoneyStanding, Spending, TenantMoney, money_of, standing
from tenant_kit import tenants

NOON = datetime(2026, 12, 30, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def cost(uid: str, total: str | int, made: datetime = NOON) -> JobMoney:
    return JobMoney(uid=uid, namespace="a", made=made, total=Decimal(total))


def test_jobs_that_end_or_are_deleted_count_until_the_period_ends() -> None:
    found = Spending(until=NOON).later([cost("x", 3), cost("y", "1.5")], NOON + HOUR)
    assert (found.day, found.month) == (Decimal("4.5"), Decimal("4.5"))
    found = found.later([cost("y", 2)], NOON + 2 * HOUR)
    assert (found.day, Spending.read(found.written()).jobs) == (5, {"y": 2})
    tomorrow = found.at(NOON + 12 * HOUR)
    assert tomorrow.later([cost("y", 2)], NOON + 36 * HOUR).jobs == {"y": 2}, "who is gone is forgotten the next day"
    assert (tomorrow.day, tomorrow.month) == (0, 5)
    assert (tomorrow.at(NOON + 2 * DAY).month, found.at(NOON - DAY)) == (0, found)


def test_who_counts_for_the_first_time_counts_what_is_spent_from_now_on_and_new_jobs_whole() -> None:
    found = Spending(until=NOON).later([cost("old", 100, NOON - HOUR)], NOON)
    assert found.day == 0
    assert found.later([cost("old", 101, NOON - HOUR), cost("new", 7)], NOON + HOUR).day == 8


def test_a_job_of_which_an_operator_hears_late_costs_what_it_has_cost_since_the_last_one() -> None:
    """As one does that has just begun, or whose reconciler has failed."""
    kept = Spending.read(Spending(until=NOON).later([cost("x", 3), cost("y", 1)], NOON + HOUR).written())
    early = kept.later([cost("y", 1)], NOON + 2 * HOUR)
    assert early.later([cost("x", 5), cost("y", 1)], NOON + 2 * HOUR).day == 6


def test_a_job_made_in_the_second_of_the_last_count_is_new() -> None:
    """The API server writes whole seconds."""
    counted = Spending(until=NOON + timedelta(milliseconds=900))
    assert counted.later([cost("x", 2, NOON)], NOON + HOUR).day == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.decimals(0, 5, places=2), st.booleans()), max_size=20))
def test_no_cost_is_lost_or_counted_twice_over_operators(course: list[tuple[int, Decimal, bool]]) -> None:
    """Each is of a job, what it costs more, and whether another operator goes on from what was written, which may be
    behind what the job's status says.
    """
    totals, now = {str(n): Decimal(0) for n in range(3)}, NOON
    found = kept = Spending(until=NOON)
    for uid, more, restarts in course:
        now += timedelta(seconds=20)
        totals[str(uid)] += more
        if restarts:
            found = Spending.read(kept.written())
        found = found.later([cost(one, total) for one, total in totals.items()], now)
        kept = found if restarts else kept
        assert found.day == sum(totals.values())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"until": "noon", "day": "1", "month": "1", "jobs": {}}'])
def test_what_nobody_has_written_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Spending.read(text)


def test_a_tenants_namespaces_count_together() -> None:
    listed = tenants({"name": "team", "namespaces": ["a", "b"]})
    spent = {name: Spending(until=NOON, day=Decimal(2), month=Decimal(3)) for name in "abc"}
    assert money_of(listed, spent, NOON) == {
        "team": TenantMoney(day=Decimal(4), month=Decimal(6)),
        "c": TenantMoney(day=Decimal(2), month=Decimal(3)),
    }
    assert money_of(listed, spent, NOON + DAY)["team"] == TenantMoney(month=Decimal(6))


@pytest.mark.parametrize(
    ("day", "month", "why"),
    [
        ("9.99", "29", ""),
        (
            "10",
            "29",
            "10 of this day; its jobs go on from their newest checkpoints, if they keep any, on 2026-12-31",
        ),
        (
            "10",
            "30",
            "30 of this month; its jobs go on from their newest checkpoints, if they keep any, on 2027-01-01",
        ),
    ],
)
def test_a_tenant_is_told_when_it_gets_money_again(day: str, month: str, why: str) -> None:
    (team,) = tenants(
        {"name": "team", "namespaces": ["a"], "most": {"moneyPerDay": "10", "moneyPerMonth": "30"}}
    ).tenants
    found = standing(team, TenantMoney(day=Decimal(day), month=Decimal(month)), NOON)
    assert found.spent.startswith(f"tenant team has spent its {why}" if why else "")
    assert bool(found.spent) == bool(why)
    left = f"{Decimal(month):.2f} of 30 in this month and {Decimal(day):.2f} of 10 in this day"
    assert found.left == f"tenant team has spent {left}"


def test_without_a_bound_there_is_nothing_to_tell() -> None:
    (team,) = tenants({"name": "team", "namespaces": ["a"], "most": {"workers": 3}}).tenants
    assert standing(team, TenantMoney(day=Decimal(10)), NOON) == MoneyStanding()
