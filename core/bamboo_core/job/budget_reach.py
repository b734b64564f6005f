"""How far a job's budget gets: its money at a price for the hour, and its date at a rate. Pure.

The operator, a local run, `bamboo plan` and the simulator say the same of the same figures.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from bamboo_core.job.spec import JobSpec, wanted_workers
from bamboo_core.text import count

HOUR: Final = 3600.0
DAYS: Final = 48 * HOUR  # seconds, from which on a time is told in days


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the job gets on now. step: how many are committed. steps: how many there are to be, None if only the task's
    data can tell. step_seconds: of one, None if none is known.
    """

    step: int
    steps: int | None
    step_seconds: float | None

    @property
    def left(self) -> int | None:
        """Steps until the last one is done."""
        return None if self.steps is None else max(0, self.steps - self.step)

    @property
    def seconds_left(self) -> float | None:
        """Until the last step is done; None if that is not known."""
        return self.left * self.step_seconds if self.left is not None and self.step_seconds else None

    def within(self, seconds: float) -> int | None:
        """How many are done in that time, and no more than there are."""
        if not self.step_seconds:
            return None
        done = int(max(0.0, seconds) / self.step_seconds + 1e-9)
        return done if self.left is None else min(self.left, done)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneyReach:
    """How far a job's money gets. hours: for which the rest of it lasts, None if nothing is paid now. steps: that are
    done with it; enough: until the last one. Both are None if that is not known.
    """

    money: Decimal
    spent: Decimal
    per_hour: Decimal | None
    hours: float | None
    steps: int | None
    left: int | None

    @property
    def enough(self) -> bool | None:
        return None if self.steps is None or self.left is None else self.steps >= self.left

    @property
    def told(self) -> str:
        """A sentence without its end."""
        text = f"{self.spent:.2f} of {self.money} spent"
        if self.hours is None or self.spent >= self.money:
            return text
        text += f"; the rest lasts {self.hours:.1f} h at {self.per_hour} an hour"
        if self.steps is None:
            return text
        if self.left is None:
            return f"{text}, about {count(self.steps, 'step')}"
        if self.enough:
            return f"{text}, enough for the {count(self.left, 'step')} that are left"
        return f"{text}, about {self.steps} of the {count(self.left, 'step')} that are left"


def money_reach(money: Decimal, spent: Decimal, per_hour: Decimal | None, pace: Pace) -> MoneyReach:
    """spent: what the job has cost. per_hour: what its workers cost now; 0 or None if none run."""
    hours = max(0.0, float((money - spent) / per_hour)) if per_hour else None
    steps = None if hours is None else pace.within(hours * HOUR)
    return MoneyReach(money=money, spent=spent, per_hour=per_hour, hours=hours, steps=steps, left=pace.left)


def spent(money: Decimal, *, keeps: bool) -> str:
    """Why a job ends that has cost as much as it may, and what helps. keeps: it has a checkpoint store."""
    on = "goes on from its newest checkpoint" if keeps else "begins anew, since it keeps no checkpoints"
    return f"the budget of {money} is spent; with a larger spec.budget.money the job {on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DateReach:
    """Whether a job is done by its date. seconds: until then, less than 0 after it. late: by how many seconds the last
    step is done too late at the present rate, less than 0 if it is before; None if that is not known. by_then: how many
    steps are done on that date.
    """

    done_by: datetime
    seconds: float
    late: float | None
    by_then: int | None
    pace: Pace

    @property
    def told(self) -> str:
        """A sentence without its end."""
        text, steps = f"done by {shown_date(self.done_by)}", self.pace.steps
        if self.pace.left == 0:
            return f"{text}: all steps are done"
        if self.seconds <= 0:
            return f"{text}: {span(-self.seconds)} ago, with {self._of(self.pace.step)} done{self._more()}"
        if self.late is None or self.by_then is None or steps is None:
            return f"{text}, in {span(self.seconds)}: whether it will be is not known yet"
        if self.late <= 0:
            return f"{text}: {span(-self.late)} before it at the present rate"
        return f"{text}: {span(self.late)} late at the present rate, with {self._of(self.by_then)} done by then"

    def _of(self, step: int) -> str:
        return count(step, "step") if self.pace.steps is None else f"{step} of {count(self.pace.steps, 'step')}"

    def _more(self) -> str:
        if self.late is None:
            return ""
        return f"; the rest takes {span(self.late + self.seconds)} more at the present rate"


def done_by(spec: JobSpec) -> datetime | None:
    """The job's date, if it has one."""
    return spec.budget.done_by if spec.budget is not None else None


def date_reach(done_by: datetime, now: datetime, pace: Pace) -> DateReach:
    seconds = (done_by - now).total_seconds()
    late = None if pace.seconds_left is None else pace.seconds_left - seconds
    if pace.left == 0:
        late = min(0.0, -seconds)
    done = pace.within(seconds)
    return DateReach(
        done_by=done_by, seconds=seconds, late=late, by_then=None if done is None else pace.step + done, pace=pace
    )


def outcome_told(date: datetime, end: datetime, pace: Pace) -> str:
    """Whether a job that ended then was done by its date; a sentence without its end."""
    if pace.left:
        return date_reach(date, end, pace).told
    seconds = (date - end).total_seconds()
    return f"done {span(abs(seconds))} {'before' if seconds >= 0 else 'after'} {shown_date(date)}"


def past(spec: JobSpec, now: datetime) -> str:
    """A sentence on a date that has passed before the job begins; "" if there is none, or it is still to come.

    It is no error: a manifest that is applied once more, or read by another operator, would become wrong by mere age.
    """
    date = done_by(spec)
    if date is None or date > now:
        return ""
    return f"spec.budget.doneBy: {shown_date(date)} has passed; the job runs all the same, as fast as it may"


def of_manifest(spec: JobSpec, now: datetime, step_seconds: float | None = None) -> list[str]:
    """How far the budget of a job gets that begins now, with all workers that it asks for in its first pool with a
    price: sentences without their ends. step_seconds: of an undisturbed step; None: that is not known.
    """
    budget, told = spec.budget, list[str]()
    if budget is None:
        return told
    workers = wanted_workers(spec)
    pool = next((pool for pool in spec.node_pools if pool.price_per_hour), None)
    pace = Pace(step=0, steps=spec.training.known_steps, step_seconds=step_seconds)
    if pool is not None and pool.price_per_hour:
        each = pool.price_per_hour
        whole = f"all {count(workers, 'worker')} in pool {pool.name}"
        if budget.money_per_hour is not None:
            paid = int(budget.money_per_hour / each)
            told.append(
                f"spec.budget.moneyPerHour {budget.money_per_hour} pays for {min(paid, workers)} of at most"
                f" {count(workers, 'worker')} in pool {pool.name}"
            )
        if budget.money is not None:
            found = money_reach(budget.money, Decimal(0), workers * each, pace)
            told.append(f"spec.budget.money with {whole}: {found.told}")
    if budget.done_by is not None and budget.done_by > now:
        told.append(f"spec.budget.doneBy: {date_reach(budget.done_by, now, pace).told}")
    return told


def shown_date(date: datetime) -> str:
    """To the second, as far as that is said."""
    date = date.astimezone(UTC)
    return f"{date:%Y-%m-%d %H:%M:%S}".removesuffix(":00") + " UTC"


def span(seconds: float) -> str:
    """3.2 days, 2.1 h, 12 min, 40 s: as exact as an estimate is worth."""
    seconds = max(0.0, seconds)
    if seconds >= DAYS:
        return f"{seconds / 86400:.1f} days"
    if seconds >= HOUR:
        return f"{seconds / HOUR:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
