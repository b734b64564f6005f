"""What the jobs of namespaces have cost in this day and month, and what that leaves their tenants. Pure.

Days and months are those of UTC. A job's status says what it has cost in all. What that has grown by since it was
looked at last is what its namespace has spent since then, also where another operator looked last; so what was counted
stays when a job ends or is deleted.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Final

from bamboo_operator.tenants.tenant_list import Tenant, TenantList

NOTHING: Final = Decimal(0)
EXACT: Final = Decimal("0.0001")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMoney:
    """A job, and what it has cost until now. made: the time of its creation. over: it costs nothing more."""

    uid: str
    namespace: str
    made: datetime
    total: Decimal
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What the jobs of a namespace have cost on the day of `until`, and in its month. until: when that was counted.
    jobs: what each one that there was had cost in all by then, by its uid; over: those of them that are over, or that
    nobody knows now.
    """

    until: datetime
    day: Decimal = NOTHING
    month: Decimal = NOTHING
    jobs: Mapping[str, Decimal] = field(default_factory=dict)
    over: frozenset[str] = frozenset()

    def at(self, now: datetime) -> "Spending":
        """This spending at a later time, when other days and months have begun."""
        if now <= self.until:
            return self
        then, today = self.until.date(), now.date()
        month = self.month if (then.year, then.month) == (today.year, today.month) else NOTHING
        return replace(self, until=now, day=self.day if then == today else NOTHING, month=month)

    def later(self, jobs: Iterable[JobMoney], now: datetime) -> "Spending":
        """With what its jobs have cost since. jobs: all that there are now. One that is new to this costs what it has
        cost since it was made; but one that was there before, when nobody counted, what it will cost from now on. One
        that is not there may come again in this day: an operator that begins hears of one after the other.
        """
        found, before = self.at(now), self.until.replace(microsecond=0)  # as exact as times of creation are
        more, totals, over = NOTHING, dict[str, Decimal](), set[str]()
        for job in jobs:
            known = self.jobs.get(job.uid, NOTHING if job.made >= before else job.total)
            totals[job.uid] = max(known, job.total)
            more += totals[job.uid] - known
            if job.over and job.made < before:  # who reads that it costs nothing more takes it for no new one
                over.add(job.uid)
        if found.until.date() == self.until.date():
            missing = {uid: total for uid, total in self.jobs.items() if uid not in totals}
            totals, over = {**missing, **totals}, {*over, *missing}
        return replace(found, day=found.day + more, month=found.month + more, jobs=totals, over=frozenset(over))

    @property
    def told(self) -> dict[str, object]:
        """What is kept of it beside the time; not the jobs that are over, which would be more and more."""
        jobs = {uid: _amount(total) for uid, total in sorted(self.jobs.items()) if uid not in self.over}
        return {"day": _amount(self.day), "month": _amount(self.month), "jobs": jobs}

    def written(self, **beside: object) -> str:
        """As it is kept, beside something else."""
        return json.dumps({"until": self.until.isoformat(), **self.told, **beside})

    @classmethod
    def read(cls, text: str) -> "Spending":
        """Raises ValueError if it is not what was written."""
        try:
            found = json.loads(text)
            jobs = {str(uid): Decimal(total) for uid, total in found["jobs"].items()}
            until = datetime.fromisoformat(found["until"]).astimezone(UTC)
            return cls(until=until, day=Decimal(found["day"]), month=Decimal(found["month"]), jobs=jobs)
        except (AttributeError, InvalidOperation, KeyError, TypeError) as error:
            raise ValueError(f"not what was written: {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantMoney:
    """What a tenant has spent in this day and month, in all its namespaces."""

    day: Decimal = NOTHING
    month: Decimal = NOTHING


@dataclass(frozen=True, slots=True)
class MoneyStanding:
    """What a job is told of its tenant's money. spent: why it is to be suspended, a sentence, "" if it may go on; the
    same as long as that is so. left: what is spent of what may be, "" without a bound.
    """

    spent: str = ""
    left: str = ""


UNCOUNTED: Final = MoneyStanding()


def money_of(tenants: TenantList, spending: Mapping[str, Spending], now: datetime) -> dict[str, TenantMoney]:
    """What each tenant has spent, by its name, of those of which something is known. spending: by namespace."""
    found: dict[str, TenantMoney] = {}
    for namespace, tenant in tenants.owners(spending).items():
        one, before = spending[namespace].at(now), found.get(tenant.name, TenantMoney())
        found[tenant.name] = TenantMoney(day=before.day + one.day, month=before.month + one.month)
    return found


def standing(tenant: Tenant, money: TenantMoney, now: datetime) -> MoneyStanding:
    """What the jobs of a tenant are told that has spent so much. The longer period comes first: it ends later."""
    left, spent = list[str](), ""
    for field_name, bound, used, ends, period in (
        ("moneyPerMonth", tenant.most.money_per_month, money.month, _next_month(now.date()), "month"),
        ("moneyPerDay", tenant.most.money_per_day, money.day, now.date() + timedelta(days=1), "day"),
    ):
        if bound is None:
            continue
        left.append(f"{used:.2f} of {bound:f} in this {period}")
        if used >= bound and not spent:
            spent = (
                f"tenant {tenant.name} has spent its {bound:f} of this {period}; its jobs go on from their newest"
                f" checkpoints, if they keep any, on {ends} at 00:00 UTC, or with a larger most.{field_name}"
            )
    return MoneyStanding(spent, f"tenant {tenant.name} has spent {' and '.join(left)}" if left else "")


def _amount(money: Decimal) -> str:
    return f"{money.quantize(EXACT):f}"


def _next_month(day: date) -> date:
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1)
