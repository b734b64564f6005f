"""How far a job's budget gets, for a person. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.job.budget_reach import HOUR, Pace, money_reach, shown_date, spent
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import BambooJobStatus
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.facts import StatusFacts

LOW_SECONDS: Final = 3600.0  # for which money lasts at least without a warning
LASTING_SECONDS: Final = 60.0  # for which a budget falls short before there is a warning
SLACK: Final = 0.02  # by which it has to, and by which it has to suffice again


def money_spent(facts: StatusFacts) -> str:
    """Return a sentence that says that the job's money is spent, and what helps; "" as long as there is some."""
    spec = facts.spec
    money = spec.budget.money if spec and spec.budget else None
    return spent(money, keeps=spec.checkpoint is not None) if spec and money is not None and facts.spent else ""


def suspends(facts: StatusFacts, phase: str) -> str:
    """Return why a job in that phase of its coordinator is suspended, if its money is spent; "" if it goes on.

    One that is saving its result does: what is left to do costs less than to do it once more.
    """
    return money_spent(facts) if phase != "Saving" else ""


def money_lasts(facts: StatusFacts) -> float:
    """Seconds until the budget is spent by the workers that are paid for now; math.inf if that will not be."""
    money = facts.spec.budget.money if facts.spec and facts.spec.budget else None
    per_hour = price_per_hour(facts.pools, facts.paid or {})
    if money is None or not (per_hour or facts.spent):
        return math.inf
    return max(0.0, float((money - facts.total_cost) / per_hour) * HOUR) if per_hour else 0.0


def budget_left(facts: StatusFacts, per_hour: Decimal | None, status: Status | None) -> str | None:
    """Return how much is spent, and how far the rest gets at the present price and speed; None without a budget of
    money. per_hour: what the job's workers cost, 0 or None if none run.
    """
    spec = facts.spec
    money = spec.budget.money if spec and spec.budget else None
    return None if money is None else money_reach(money, facts.total_cost, per_hour, pace_of(status)).told


def pace_of(status: Status | None) -> Pace:
    """How a job gets on, as far as its coordinator says."""
    if status is None:
        return Pace(step=0, steps=None, step_seconds=None)
    return Pace(step=status.step, steps=status.steps, step_seconds=status.step_seconds)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a budget does not suffice for."""

    reason: str  # CamelCase
    of: str  # the money or the date
    # a sentence, the same as long as that is so, since how far the job gets changes all the time and is told beside it
    message: str

    @property
    def key(self) -> str:
        return f"{self.reason} {self.of}"


def shortfalls(
    spec: JobSpec, total: Decimal, per_hour: Decimal | None, status: Status, *, before: bool
) -> list[Shortfall]:
    """The most urgent first. before: was there one? Then it ends only when the budget suffices clearly."""
    return [*_money_short(spec, total, per_hour, pace_of(status), before), *_date_missed(status, before)]


def _money_short(
    spec: JobSpec, total: Decimal, per_hour: Decimal | None, pace: Pace, before: bool
) -> Iterator[Shortfall]:
    money = spec.budget.money if spec.budget else None
    if money is None:
        return
    hours = money_reach(money, total, per_hour, pace).hours
    if hours is None:
        return
    seconds = pace.seconds_left
    if seconds is not None and hours * HOUR >= _margin(before) * seconds:
        return
    if hours * HOUR < LOW_SECONDS:
        text = f"the rest of spec.budget.money {money} lasts for less than an hour; then the job is suspended"
        yield Shortfall("MoneyLow", f"{money}", text)
    if seconds is not None:
        text = f"spec.budget.money {money} is spent before the last step, at the present price and speed"
        yield Shortfall("MoneyShort", f"{money}", text)


def _date_missed(status: Status, before: bool) -> Iterator[Shortfall]:
    found = status.date
    if found is None or found.pace.left == 0:
        return
    date = shown_date(found.done_by)
    if found.seconds <= 0:
        yield Shortfall("DateMissed", date, f"spec.budget.doneBy {date} has passed, and the job is not done")
    elif found.late is not None and found.late + found.seconds > found.seconds / _margin(before):
        yield Shortfall("DateMissed", date, f"at the present rate the job is not done by spec.budget.doneBy {date}")


def _margin(before: bool) -> float:
    """How much of what it takes has to be there."""
    return 1 + SLACK if before else 1 - SLACK


def warned_of(
    earlier: Sequence[str], found: Sequence[Shortfall], since: datetime | None, now: datetime, spec: JobSpec | None
) -> tuple[str, ...]:
    """The shortfalls of the present budget of which the user has been warned, with an event each: of each kind once.

    since: when the budget began to fall short. It has to last for a while, as steps may be slow for a moment.
    """
    budget = spec.budget if spec is not None else None
    present = {f"{budget.money}", shown_date(budget.done_by) if budget.done_by else ""} if budget is not None else set()
    kept = [key for key in earlier if key.partition(" ")[2] in present]
    lasting = since is not None and (now - since).total_seconds() >= LASTING_SECONDS
    return (*kept, *(one.key for one in found if lasting and one.key not in kept))


def warnings(new: BambooJobStatus, old: BambooJobStatus, found: Sequence[Shortfall]) -> list[Emit]:
    """The warnings that this status brings and the one before did not; each says how far the job gets."""
    keys = set(new.budget_warnings or ()) - set(old.budget_warnings or ())
    return [Emit(one.reason, _with_how_far(new, one), True) for one in found if one.key in keys]


def _with_how_far(status: BambooJobStatus, one: Shortfall) -> str:
    if one.reason == "DateMissed":
        return status.training.done_by or one.message
    return f"{one.message}: {status.cost.budget}" if status.cost.budget else one.message
