"""How far a job's budget gets, for a person. Pure."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from bamboo_core.job.budget_reach import HOUR, done_by, hours_left, seconds_late, shown_date, spent
from bamboo_core.job.spec import JobSpec
from bamboo_operator.status.facts import StatusFacts

LOW_SECONDS: Final = 3600.0  # for which money lasts at least without a warning


def money_spent(facts: StatusFacts) -> str:
    """Return a sentence that says that the job's money is spent, and what helps; "" as long as there is some."""
    spec = facts.spec
    money = spec.budget.money if spec and spec.budget else None
    return spent(money, keeps=spec.checkpoint is not None) if spec and money is not None and facts.spent else ""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a budget does not suffice for."""

    reason: str  # CamelCase
    # a sentence, the same as long as that is so: how far the job gets changes all the time
    message: str


def money_low(spec: JobSpec, total: Decimal, per_hour: Decimal | None, left: float | None) -> Shortfall | None:
    """Return that the money is spent within an hour, unless the job is done by then. total: what the job has cost;
    per_hour: what its workers cost; left: seconds until the last step is done, None if they are not known.
    """
    money = spec.budget.money if spec.budget else None
    hours = None if money is None else hours_left(money, total, per_hour)
    if hours is None or hours * HOUR >= LOW_SECONDS or (left is not None and left <= hours * HOUR):
        return None
    text = f"the rest of spec.budget.money {money} lasts for less than an hour; then the job is suspended"
    return Shortfall("MoneyLow", text)


def date_missed(spec: JobSpec, now: datetime, left: float | None) -> Shortfall | None:
    """Return that the job is not done by its date, or will not be. left: as above."""
    date = done_by(spec)
    if date is None or left == 0:
        return None
    if date <= now:
        return Shortfall("DateMissed", f"spec.budget.doneBy {shown_date(date)} has passed, and the job is not done")
    if (seconds_late(date, now, left) or 0.0) <= 0:
        return None
    return Shortfall("DateMissed", f"at the present rate the job is not done by spec.budget.doneBy {shown_date(date)}")
