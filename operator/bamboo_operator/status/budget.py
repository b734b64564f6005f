"""How far a job's budget gets, for a person. Pure."""

import math
from decimal import Decimal

from bamboo.coordinator.events import Status
from bamboo.job.budget_reach import HOUR, Pace, money_reach
from bamboo.job.spec import JobSpec
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.facts import StatusFacts


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
    return money_reach(money, total, per_hour, pace_of(status)).told


def pace_of(status: Status | None) -> Pace:
    """How a job gets on, as far as its coordinator says."""
    if status is None:
        return Pace(step=0, steps=None, step_seconds=None)
    return Pace(step=status.step, steps=status.steps, step_seconds=status.step_seconds)
