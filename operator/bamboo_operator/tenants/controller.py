"""Decides again and again what each job of the operator may have, and tells those for whom it is something else."""

import asyncio
import time
from collections.abc import Collection
from typing import Final, Protocol

from bamboo_operator.tenants.decision import grants, grants_unread
from bamboo_operator.tenants.demand import Grant, JobDemand
from bamboo_operator.tenants.line import NO_LINES, Lines
from bamboo_operator.tenants.tenant_list import TenantSource

LOOK_SECONDS: Final = 1.0
SETTLED_LOOKS: Final = 3  # at the beginning, with as many jobs each time: then all have been listed


class TenantJob(Protocol):
    """A job that shares the nodes."""

    def demand(self) -> JobDemand | None:
        """What it wants and has; None if it is not to train now."""

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

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Decide once."""
        jobs = {demand.name: (job, demand) for job in self._jobs.running() if (demand := job.demand()) is not None}
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
