"""The writer of a job's status, which remembers the last written one.

The field `plan` of a job's status is the record of a training job for the next operator. Before the first plan it has
only the workers that were lost before they could join. Otherwise it is JSON with the epoch, each pipeline's owners in
the order of stages, a digest of the task, which must not have changed, and two lists of workers whose pods still exist:
`lost` or leaving by order without a part, and `counted`, under notice or leaving by order with a part in the plan. The
next operator does not count the latter as preempted: an earlier one did, or they were not.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.coordinator.progress import EarlierProgress
from bamboo_core.job.api_object import written
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import read_status
from bamboo_core.kube.api import KubeApi
from bamboo_core.planning.plan import Plan, WorkerId
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.document import job_status, worth_writing
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from bamboo_operator.status.merge_patch import either, merge_patch


def plan_record(plan: Plan, lost: Iterable[WorkerId], counted: Iterable[WorkerId], task: str) -> str:
    """Return the record of a plan, for the job's status.

    counted: other workers whose end another operator counts as no preemption. task: the task's digest.
    """
    rows = [[assignment.owner for assignment in row] for row in plan.pipelines]
    record = {"epoch": plan.epoch, "pipelines": rows, "lost": sorted(lost), "counted": sorted(counted), "task": task}
    return json.dumps(record, separators=(",", ":"))


def start_record(lost: Iterable[WorkerId]) -> str:
    """Return the record of a job without a plan."""
    return json.dumps({"lost": sorted(lost)}, separators=(",", ":"))


def trains(record: str | None) -> bool:
    """Return whether the record has a plan. An unreadable record, of another version, counts as one."""
    return bool(record) and (_field(record, "lost") is None or _field(record, "pipelines") is not None)


def lost_workers_in(record: str | None) -> frozenset[WorkerId]:
    """Return the lost workers; none if the record is absent, of another version, or written by hand."""
    return _workers(record, "lost")


def counted_workers_in(record: str | None) -> frozenset[WorkerId]:
    """Return the workers whose preemption was counted with their notice, or that leave by order."""
    return _workers(record, "counted")


def _workers(record: str | None, name: str) -> frozenset[WorkerId]:
    names = _field(record, name)
    return frozenset(one for one in names if isinstance(one, str)) if isinstance(names, list) else frozenset()


def task_digest_in(record: str | None) -> str | None:
    digest = _field(record, "task")
    return digest if isinstance(digest, str) else None


def _field(record: str | None, name: str) -> Any:
    try:
        return json.loads(record or "{}")[name]
    except (ValueError, KeyError, TypeError):
        return None


class StatusWriter:
    """The only writer of a job's status. found: the existing one. earlier: counts before the newest coordinator."""

    def __init__(self, job: JobIdentity, found: Mapping[str, Any], api: KubeApi) -> None:
        (self._key, self._uid), self._api = job, api
        self.written = read_status(found)
        self._written_at = 0.0
        self._warnings: list[Emit] = []
        self._stored: Mapping[str, Any] = found  # the status that the API server has, or may have
        self._answered = True  # False: the answer to the last write was lost
        self.earlier = EarlierCounts.of(self.written)

    def begin(self) -> None:
        """Note that a coordinator is created, whose counts add to the earlier ones; costs go on as they are."""
        self.earlier = replace(EarlierCounts.of(self.written), cost=self.earlier.cost)

    @property
    def over(self) -> bool:
        """Return whether the job's end is written."""
        return self.written.ended is not None

    @property
    def plan(self) -> str | None:
        """Return the plan record while workers train, perhaps left by another operator; else None."""
        return self.written.plan if trains(self.written.plan) else None

    @property
    def suspended(self) -> bool:
        """Return whether the job is suspended and its workers were told to stop, perhaps by another operator."""
        return self.plan is None and self.written.holds("Suspended")

    @property
    def lost(self) -> frozenset[str]:
        """Return the workers whose loss was handled, though their pods may still exist."""
        return lost_workers_in(self.written.plan)

    @property
    def counted(self) -> frozenset[str]:
        """Return the workers that may still train and whose preemption was counted, or that leave by order."""
        return counted_workers_in(self.written.plan)

    @property
    def created(self) -> int:
        """Return how many workers were ever created."""
        return self.written.workers_created or 0

    def progress(self, spec: JobSpec | None) -> EarlierProgress:
        """Return the job's progress in the last written status."""
        training = self.written.training
        speed = training.samples_per_second
        seconds = spec.training.global_batch_size / speed if spec and speed else None
        return EarlierProgress(step=training.step or 0, step_seconds=seconds)

    async def write(self, facts: StatusFacts, status: Status | None, created: int | None = None) -> None:
        """Write the status if it has changed enough. Raises RemoteError, and JobGone.

        status: the coordinator's. created: number of workers ever created; None if unchanged.
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
        """Return, and forget, the warnings caused by writes since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings
