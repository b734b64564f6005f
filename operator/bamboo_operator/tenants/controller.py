"""Decides again and again what each job of the operator may have, and tells those for whom it is something else."""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final, Protocol

from bamboo_operator.tenants.decision import grants, grants_unread
from bamboo_operator.tenants.demand import Grant, JobDemand
from bamboo_operator.tenants.line import NO_LINES, Lines
from bamboo_operator.tenants.tenant_list import TenantSource

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
ASKED_AT_ONCE: Final = 20  # jobs, before others of the process get their turn
SETTLED_LOOKS: Final = 3  # at the beginning, with as many jobs each time: then all have been listed


class TenantJob(Protocol):
    """A job that shares the nodes."""

    def demand(self) -> JobDemand | None:
        """What it wants and has; None if that is nothing."""

    def granted(self, grant: Grant) -> None:
        """It may have that from now on."""


class Jobs(Protocol):
    def running(self) -> Collection[TenantJob]: ...


class TenantController:
    """Alone decides what jobs may have. lines: of jobs that wait for the same nodes."""

    def __init__(self, source: TenantSource, jobs: Jobs) -> None:
        self._source, self._jobs = source, jobs
        self._lines: Lines = NO_LINES
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
        jobs: dict[str, tuple[TenantJob, JobDemand]] = {}
        for number, job in enumerate(self._jobs.running()):
            if (demand := job.demand()) is not None:
                jobs[demand.name] = job, demand
            if number % ASKED_AT_ONCE == ASKED_AT_ONCE - 1:
                await asyncio.sleep(0)
        if not self._has_settled(len(jobs)):
            return
        demands, tenants = [demand for _, demand in jobs.values()], self._source.current
        if tenants is None:
            found = grants_unread(demands)
        else:
            found, self._lines = grants(demands, tenants, self._lines, time.monotonic())
        for name, (job, _) in jobs.items():
            job.granted(found[name])

    def _has_settled(self, count: int) -> bool:
        """An operator that has just begun hears of one job after the other, and none may have what another has."""
        if self._looks < SETTLED_LOOKS:
            self._looks = self._looks + 1 if count == self._count else 0
            self._count = count
        return self._looks >= SETTLED_LOOKS
