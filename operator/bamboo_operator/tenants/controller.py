"""Decides again and again what each job of the operator may have, and tells those for whom it is something else."""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final, Protocol

from bamboo_operator.tenants.claims import divided_shares
from bamboo_operator.tenants.decision import grants, grants_unread, waiting_for
from bamboo_operator.tenants.demand import Grant, JobDemand
from bamboo_operator.tenants.line import NO_LINES, Lines
from bamboo_operator.tenants.record import TenantRecord
from bamboo_operator.tenants.spending import UNCOUNTED, JobMoney, MoneyStanding, TenantMoney, money_of, standing
from bamboo_operator.tenants.tenant_list import TenantList, TenantSource

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
ASKED_AT_ONCE: Final = 20  # jobs, before others of the process get their turn
NOTHING_SPENT: Final = TenantMoney()
SETTLED_LOOKS: Final = 3  # at the beginning, with as many jobs each time: then all have been listed


class TenantJob(Protocol):
    """A job that shares the nodes."""

    def demand(self) -> JobDemand | None:
        """What it wants and has; None if that is nothing."""

    def granted(self, grant: Grant) -> None:
        """It may have that from now on."""

    def money(self) -> JobMoney:
        """What it has cost."""

    def money_told(self, standing: MoneyStanding) -> None:
        """That is how its tenant's money stands."""


class Jobs(Protocol):
    def running(self) -> Collection[TenantJob]: ...


class TenantController:
    """Alone decides what jobs may have. record: of what they have spent, and of what others have. shards: into which
    jobs are divided.
    """

    def __init__(self, source: TenantSource, jobs: Jobs, record: TenantRecord | None = None, shards: int = 1) -> None:
        self._source, self._jobs, self._record, self._shards = source, jobs, record or TenantRecord(), shards
        self._lines: Lines = NO_LINES  # of jobs that wait for the same nodes
        self._looks, self._count = 0, -1  # with as many jobs
        self._said: str | None = None  # what failed last

    async def run(self) -> None:
        """Until it is cancelled. A look that fails is a bug; all keep what they have, and the next may go well."""
        while True:
            try:
                await self.look()
                self._said = None
            except Exception as error:
                if (said := repr(error)) != self._said:
                    logger.exception("what jobs may have could not be decided")
                self._said = said
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Decide once."""
        seen = self._record.seen_claims()
        jobs: dict[str, tuple[TenantJob, JobDemand]] = {}
        for number, job in enumerate(self._jobs.running()):
            if (demand := job.demand()) is not None:
                jobs[demand.name] = job, demand
            if number % ASKED_AT_ONCE == ASKED_AT_ONCE - 1:
                await asyncio.sleep(0)
        if not self._has_settled(len(jobs)):
            return
        demands, tenants = [demand for _, demand in jobs.values()], self._source.current
        unknown = self._tell_money(tenants)
        if tenants is None:
            found = grants_unread(demands)
        else:
            held, claims = divided_shares(demands, tenants, seen, self._shards)
            self._record.claim(claims, seen)
            found, self._lines = grants(demands, tenants, self._lines, time.monotonic(), held)
            waits = waiting_for("the record of what its tenant has spent")
            found |= {one.name: waits for one in demands if one.namespace in unknown and not one.begun}
        for name, (job, _) in jobs.items():
            job.granted(found[name])

    def _tell_money(self, tenants: TenantList | None) -> set[str]:
        """Counts what was spent, and tells jobs how that stands. The namespaces whose tenants may have spent more than
        is known; for their jobs it stays as it was.
        """
        moneys = [(job, job.money()) for job in self._jobs.running()]
        self._record.count(money for _, money in moneys)
        if tenants is None:
            return set()
        now, spent = self._record.clock(), self.spent()
        owners = tenants.owners(money.namespace for _, money in moneys)
        uncounted = {owners[namespace].name for namespace in owners if not self._record.counts(namespace)}
        unknown = {name for name, one in owners.items() if one.most.has_sum and one.name in uncounted}
        told = {
            tenant.name: standing(tenant, spent.get(tenant.name, NOTHING_SPENT), now)
            if tenant.most.has_sum
            else UNCOUNTED
            for tenant in owners.values()
        }
        for job, money in moneys:
            if money.namespace not in unknown:
                job.money_told(told[owners[money.namespace].name])
        return unknown

    def spent(self) -> dict[str, TenantMoney]:
        """What each tenant has spent, by its name, as far as it is known; from any thread."""
        tenants = self._source.current
        return {} if tenants is None else money_of(tenants, self._record.current, self._record.clock())

    def _has_settled(self, count: int) -> bool:
        """An operator that has just begun hears of one job after the other, and none may have what another has."""
        if self._looks < SETTLED_LOOKS:
            self._looks = self._looks + 1 if count == self._count else 0
            self._count = count
        return self._looks >= SETTLED_LOOKS
