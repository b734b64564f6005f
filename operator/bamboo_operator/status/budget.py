"""How far a job's budget gets, for a person. Pure."""

import math
from decimal import Decimal

from bamboo.coordinator.events import Status
from bamboo.job.spec import JobSpec
from bamboo.text import count
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.facts import StatusFacts

HOUR = 3600


def budget_spent(spec: JobSpec) -> str:
    """Why the job is suspended, and what helps."""
    money = spec.budget.money if spec.budget else None
    return f"the budget of {money} is spent; with a larger spec.budget.money the job goes on from its newest checkpoint"


def money_lasts(facts: StatusFacts) -> float:
    """Seconds until the budget is spent by the workers that are paid for now; math.inf if that will not be."""
    money = facts.spec.budget.money if facts.spec and facts.spec.budget else None
    per_hour = price_per_hour(facts.spec.node_pools, facts.paid or {}) if facts.spec else None
    if money is None or not (per_hour or facts.spent):
        return math.inf
    return max(0.0, float((money - facts.total_cost) / per_hour) * HOUR) if per_hour else 0.0


def budget_left(spec: JobSpec | None, total: Decimal, per_hour: Decimal | None, status: Status | None) -> str | None:
    """How much is spent, and how far the rest gets at the present price and speed; None without a budget for the job.

    total: what the job has cost. per_hour: what its workers cost, 0 or None if none run.
    """
    money = spec.budget.money if spec and spec.budget else None
    if money is None:
        return None
    text = f"{total:.2f} of {money} spent"
    if not per_hour or total >= money:
        return text
    hours = float((money - total) / per_hour)
    text += f"; the rest lasts {hours:.1f} h at {per_hour} an hour"
    if status is None or not status.step_seconds:
        return text
    steps = int(hours * HOUR / status.step_seconds)
    if status.steps is None:
        return f"{text}, about {count(steps, 'step')}"
    left = status.steps - status.step
    if steps >= left:
        return f"{text}, enough for the {count(left, 'step')} that are left"
    return f"{text}, about {steps} of the {count(left, 'step')} that are left"
