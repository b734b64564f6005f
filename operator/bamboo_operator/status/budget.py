"""Sentences about a job's budget: money spent or nearly spent, or a finishing date that the job misses. Pure."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from bamboo_core.job.budget_reach import HOUR, done_by, hours_left, seconds_late, shown_date, spent
from bamboo_core.job.spec import JobSpec
from bamboo_operator.status.facts import StatusFacts

LOW_SECONDS: Final = 3600.0  # money that lasts for less causes a warning


def money_spent(facts: StatusFacts) -> str:
    """Return a message that the job's budget is spent, with a remedy; "" if money is left, or there is no limit."""
    spec = facts.spec
    money = spec.budget.money if spec and spec.budget else None
    return spent(money, keeps=spec.checkpoint is not None) if spec and money is not None and facts.spent else ""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A part of the budget that does not suffice."""

    reason: str  # CamelCase
    # a sentence without changing figures, so that it stays the same
    message: str


def money_low(spec: JobSpec, total: Decimal, per_hour: Decimal | None, left: float | None) -> Shortfall | None:
    """Return a shortfall if the money will be spent within an hour and before the job is done; else None.

    total: the job's cost so far. per_hour: the current cost of its workers. left: seconds until the last step; None if
    unknown.
    """
    money = spec.budget.money if spec.budget else None
    hours = None if money is None else hours_left(money, total, per_hour)
    if hours is None or hours * HOUR >= LOW_SECONDS or (left is not None and left <= hours * HOUR):
        return None
    text = f"the rest of spec.budget.money {money} lasts for less than an hour; then the job is suspended"
    return Shortfall("MoneyLow", text)


def date_missed(spec: JobSpec, now: datetime, left: float | None) -> Shortfall | None:
    """Return a shortfall if the job is not done by its date, or will not be; else None. left: as in `money_low`."""
    date = done_by(spec)
    if date is None or left == 0:
        return None
    if date <= now:
        return Shortfall("DateMissed", f"spec.budget.doneBy {shown_date(date)} has passed, and the job is not done")
    if (seconds_late(date, now, left) or 0.0) <= 0:
        return None
    return Shortfall("DateMissed", f"at the present rate the job is not done by spec.budget.doneBy {shown_date(date)}")
