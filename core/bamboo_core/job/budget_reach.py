"""Forecasts for a job's budget: how long its money lasts, and whether it meets its date at the current rate. Pure.

The operator, the job page, the terminal and local runs show the sentences of this module.
"""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from bamboo_core.job.spec import JobSpec, wanted_workers
from bamboo_core.text import count

HOUR: Final = 3600.0
DAYS: Final = 48 * HOUR  # seconds; longer durations are given in days


# money


def hours_left(money: Decimal, spent: Decimal, per_hour: Decimal | None) -> float | None:
    """Return the hours for which the remaining money lasts, at least 0; None if nothing costs money now."""
    return max(0.0, float((money - spent) / per_hour)) if per_hour else None


def spent(money: Decimal, *, keeps: bool) -> str:
    """Return the message that the budget is spent, and what a larger one would do. keeps: the job keeps checkpoints."""
    on = "goes on from its newest checkpoint" if keeps else "begins anew, since it keeps no checkpoints"
    return f"the budget of {money} is spent; with a larger spec.budget.money the job {on}"


def of_manifest(spec: JobSpec) -> str:
    """Return a sentence, without a full stop, on how long a job's money lasts with all requested workers, at the price
    of the first pool with a price above 0; "" without a money limit or such a pool.
    """
    pool = next((pool for pool in spec.node_pools if pool.price_per_hour), None)
    money = spec.budget.money if spec.budget is not None else None
    if money is None or pool is None or not pool.price_per_hour:
        return ""
    workers = wanted_workers(spec)
    per_hour = workers * pool.price_per_hour
    lasts = hours_left(money, Decimal(0), per_hour)
    return (
        f"spec.budget.money: {money} lasts {lasts:.1f} h with all {count(workers, 'worker')} in pool {pool.name}, at"
        f" {per_hour} an hour"
    )


# the date


def done_by(spec: JobSpec) -> datetime | None:
    """Return the date by which the job has to be done (spec.budget.doneBy); None without one."""
    return spec.budget.done_by if spec.budget is not None else None


def seconds_late(date: datetime, now: datetime, left: float | None) -> float | None:
    """Return the seconds by which the job misses its date, negative if it is early; None if `left` is None.

    left: seconds until the last step at the current rate, None if unknown. If it is 0, all steps are done; the result
    is then at most 0.
    """
    until = (date - now).total_seconds()
    if left is None:
        return None
    return min(0.0, -until) if left == 0 else left - until


def date_told(date: datetime | None, now: datetime, left: float | None) -> str:
    """Return a sentence, without a full stop, on whether the job meets its date (`seconds_late`); "" without a date."""
    if date is None:
        return ""
    text, late, until = f"done by {shown_date(date)}", seconds_late(date, now, left), (date - now).total_seconds()
    if left == 0:
        return f"{text}: all steps are done"
    if until <= 0:
        more = "" if left is None else f"; the rest takes {span(left)} more at the present rate"
        return f"{text}: {span(-until)} ago{more}"
    if late is None:
        return f"{text}, in {span(until)}: whether it will be is not known yet"
    if late <= 0:
        return f"{text}: {span(-late)} before it at the present rate"
    return f"{text}: {span(late)} late at the present rate"


def past(spec: JobSpec, now: datetime) -> str:
    """Return a warning if the job has a date that is not after `now`; "" otherwise.

    A past date is no error, because a manifest must not become invalid by age when it is applied or read again.
    """
    date = done_by(spec)
    if date is None or date > now:
        return ""
    return f"spec.budget.doneBy: {shown_date(date)} has passed; the job runs all the same"


def shown_date(date: datetime) -> str:
    """Return the date in UTC, without seconds if they are 0."""
    date = date.astimezone(UTC)
    return f"{date:%Y-%m-%d %H:%M:%S}".removesuffix(":00") + " UTC"


def span(seconds: float) -> str:
    """Return a duration with the precision of an estimate: 3.2 days, 2.1 h, 12 min, 40 s."""
    seconds = max(0.0, seconds)
    if seconds >= DAYS:
        return f"{seconds / 86400:.1f} days"
    if seconds >= HOUR:
        return f"{seconds / HOUR:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
