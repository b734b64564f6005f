"""A manifest's budget as bounds of options, and how far it gets with one, in the words of a job that runs. Pure."""

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal

from bamboo.sizing.choice import Bounds
from bamboo.sizing.trials.trial import Assessment
from bamboo_core.job.budget_reach import HOUR, Pace, done_by, money_reach, outcome_told
from bamboo_core.job.spec import JobSpec


def bounds_of(spec: JobSpec, now: datetime, budget: float | None, deadline: float | None) -> Bounds:
    """budget, deadline (hours): what flags say, which comes before the manifest's. A date that has passed is none."""
    said, date = spec.budget, done_by(spec)
    if budget is None and said is not None and said.money is not None:
        budget = float(said.money)
    if deadline is None and date is not None and date > now:
        deadline = (date - now).total_seconds() / HOUR
    per_hour = said.money_per_hour if said is not None else None
    return Bounds(budget=budget, deadline=deadline, per_hour=None if per_hour is None else float(per_hour))


def date_sentence(spec: JobSpec, one: Assessment, now: datetime) -> str:
    """Whether a job that begins now is done by the manifest's date with that option; "" without a date."""
    date = done_by(spec)
    if date is None or not math.isfinite(one.sure("hours")):
        return ""
    steps = spec.training.steps
    end = now + timedelta(hours=one.sure("hours"))
    return f"A job that begins now is {outcome_told(date, end, Pace(step=steps, steps=steps, step_seconds=None))}."


def too_little(spec: JobSpec, bounds: Bounds, fastest: Assessment, cheapest: Assessment) -> Iterator[str]:
    """Parts of a sentence on bounds that no option keeps: how far the job gets with them, at an option's mean rate."""
    if bounds.budget is not None and (pace := _pace(spec, cheapest)) and cheapest.usd > 0:
        per_hour = Decimal(f"{cheapest.usd / cheapest.hours:.6f}")
        found = money_reach(Decimal(str(bounds.budget)), Decimal(0), per_hour or None, pace)
        if found.enough is False and found.hours is not None:
            yield (
                f"with the cheapest {bounds.budget:g} last {found.hours:.1f} h, for about {found.steps} of"
                f" {spec.training.steps} steps"
            )
    if bounds.deadline is not None and (pace := _pace(spec, fastest)):
        done = pace.within(bounds.deadline * HOUR)
        if done is not None and done < spec.training.steps:
            yield f"with the fastest about {done} of {spec.training.steps} steps are done in time"


def _pace(spec: JobSpec, one: Assessment) -> Pace | None:
    if not math.isfinite(one.hours) or one.hours <= 0:
        return None
    steps = spec.training.steps
    return Pace(step=0, steps=steps, step_seconds=one.hours * HOUR / steps)
