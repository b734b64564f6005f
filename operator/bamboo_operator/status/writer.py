"""The writer of a job's status, which remembers the last status written."""

import time
from collections.abc import Mapping
from decimal import Decimal
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
from bamboo_operator.status.facts import StatusFacts
from bamboo_operator.status.merge_patch import either, merge_patch


class StatusWriter:
    """The only writer of a job's status. existing: the status in the cluster. earlier: the status at the creation of
    the newest coordinator, whose counts are added to it.
    """

    def __init__(self, job: JobIdentity, existing: Mapping[str, Any], api: KubeApi) -> None:
        (self._key, self._uid), self._api = job, api
        self.written = read_status(existing)
        self._written_at = 0.0
        self._warnings: list[Emit] = []
        self._stored: Mapping[str, Any] = existing  # the status that the API server has, or may have
        self._answered = True  # False: the answer to the last write was lost
        self.earlier = self.written  # of the coordinators before the newest one
        self.earlier_cost = Decimal(self.written.cost.total or 0)  # of the operators before this one

    def begin(self) -> None:
        """Make the written status `earlier`, for a new coordinator, whose counts begin at 0."""
        self.earlier = self.written

    @property
    def plan(self) -> str | None:
        """The written plan record if workers may train by it, perhaps since an earlier operator; else None.

        A record that this version cannot read is returned, too; one without pipelines is not.
        """
        record, text = self.written.plan_record, self.written.plan
        return (text or None) if record.lost is None or record.pipelines else None

    @property
    def suspended(self) -> bool:
        """Whether the written status is Suspended without a plan: this or an earlier operator stopped the workers."""
        return self.plan is None and self.written.holds("Suspended")

    def progress(self, spec: JobSpec | None) -> EarlierProgress:
        """Return the job's progress in the last written status."""
        training = self.written.training
        speed = training.samples_per_second
        seconds = spec.training.global_batch_size / speed if spec and speed else None
        return EarlierProgress(step=training.step or 0, step_seconds=seconds)

    async def write(self, facts: StatusFacts, status: Status | None, created: int | None = None) -> None:
        """Write the status if it changed enough, or the last write got no answer. Raises RemoteError and JobGone.

        status: the coordinator's; None without one. created: number of workers ever created; None if unchanged.
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
        before, document = self._stored, written(new)
        self._stored, self._answered = either(before, document), False
        await self._api.write_status(*self._key, self._uid, merge_patch(document, before))
        short, earlier = (one.condition("BudgetShort") for one in (new, self.written))
        if short is not None and short.holds and not (earlier and earlier.holds and earlier.reason == short.reason):
            self._warnings.append(Emit(short.reason, short.message, True))
        self.written, self._written_at, self._stored, self._answered = new, time.monotonic(), document, True

    def take_warnings(self) -> list[Emit]:
        """Return the warnings that writes have caused since the last call, and forget them."""
        warnings, self._warnings = self._warnings, []
        return warnings
