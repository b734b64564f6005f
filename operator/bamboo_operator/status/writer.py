"""Writes a job's status, of which it keeps what was written last."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.coordinator.progress import EarlierProgress
from bamboo_core.job.api_object import written
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import read_status
from bamboo_core.kube.api import KubeApi
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.document import job_status, worth_writing
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from bamboo_operator.status.merge_patch import either, merge_patch
from bamboo_operator.status.plan_record import counted_workers_in, lost_workers_in, trains


class StatusWriter:
    """What alone writes a job's status. found: the status that there is. earlier: what had been counted before the
    newest coordinator was created.
    """

    def __init__(self, job: JobIdentity, found: Mapping[str, Any], api: KubeApi) -> None:
        (self._key, self._uid), self._api = job, api
        self.written = read_status(found)
        self._written_at = 0.0
        self._warnings: list[Emit] = []
        self._stored: Mapping[str, Any] = found  # what the API server has, or may have
        self._answered = True  # False: the answer to the last write was lost
        self.earlier = EarlierCounts.of(self.written)

    def begin(self) -> None:
        """A coordinator is created: what was counted before it is added to what it counts.

        Costs are counted all the time, with and without one.
        """
        self.earlier = replace(EarlierCounts.of(self.written), cost=self.earlier.cost)

    @property
    def over(self) -> bool:
        """Is the end of the job written down?"""
        return self.written.ended is not None

    @property
    def plan(self) -> str | None:
        """There is one while there are workers that train, perhaps left by another operator."""
        return self.written.plan if trains(self.written.plan) else None

    @property
    def lost(self) -> frozenset[str]:
        """Workers whose loss is counted, though their pods may still be there."""
        return lost_workers_in(self.written.plan)

    @property
    def counted(self) -> frozenset[str]:
        """Return the workers that may still train and whose preemption is counted, or which leave by order."""
        return counted_workers_in(self.written.plan)

    @property
    def created(self) -> int:
        """How many workers were ever created."""
        return self.written.workers_created or 0

    def progress(self, spec: JobSpec | None) -> EarlierProgress:
        """How far the job had come when that was written last."""
        training = self.written.training
        speed = training.samples_per_second
        seconds = spec.training.global_batch_size / speed if spec and speed else None
        return EarlierProgress(step=training.step or 0, step_seconds=seconds)

    async def write(self, facts: StatusFacts, status: Status | None, created: int | None = None) -> None:
        """Write the status that these make, if it is worth a write. Raises RemoteError, and JobGone.

        status: the coordinator's; created: how many workers were ever created, None if no more were.
        """
        new = job_status(status, self.written, facts)
        started = self.written.start_time or (facts.time if status else None)
        new = msgspec.structs.replace(
            new,
            start_time=None if facts.suspended and new.ended is None else started,
            workers_created=created if created is not None else self.written.workers_created,
        )
        if self._answered and not worth_writing(new, self.written, time.monotonic() - self._written_at):
            return
        before, told = self._stored, written(new)
        self._stored, self._answered = either(before, told), False
        await self._api.write_status(*self._key, self._uid, merge_patch(told, before))
        short, earlier = (one.condition("BudgetShort") for one in (new, self.written))
        if short is not None and short.holds and not (earlier and earlier.holds and earlier.reason == short.reason):
            self._warnings.append(Emit(short.reason, short.message, True))
        self.written, self._written_at, self._stored, self._answered = new, time.monotonic(), told, True

    def take_warnings(self) -> list[Emit]:
        """What the user is warned of by what was written since this was asked last."""
        found, self._warnings = self._warnings, []
        return found
