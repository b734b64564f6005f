"""Writes a job's status: as it was written last, and the facts that the next one is made of."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from bamboo_core.coordinator.events import Emit, Status
from bamboo_core.coordinator.progress import EarlierProgress
from bamboo_operator.kube.client import ApiClient
from bamboo_operator.kube.objects import JobIdentity, parsed_time, utc_now
from bamboo_operator.status.budget import warnings as budget_warnings
from bamboo_operator.status.document import PROGRESS_SECONDS, job_status, rule_input, worth_writing
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from bamboo_operator.status.merge_patch import either, merge_patch
from bamboo_operator.status.plan_record import lost_workers_in, trains
from bamboo_operator.status.savings import CostComparison


class StatusWriter:
    """What writes a job's status. written: the status that was found."""

    def __init__(self, job: JobIdentity, selector: str, written: Mapping[str, Any], api: ApiClient) -> None:
        (self._key, self._uid), self._api = job, api
        self.written: dict[str, Any] = dict(written)
        self._written_at = 0.0
        self._warnings: list[Emit] = []
        self._possible: dict[str, Any] | None = None  # what may have been written, too: the answer was lost
        self.facts = StatusFacts(
            now=utc_now(),
            generation=0,
            spec=None,
            earlier=EarlierCounts.of(self.written),
            selector=selector,
            comparison=CostComparison.of(self.written),
            counted_until=_counted_until(self.written),
        )

    def update(self, **facts: Any) -> None:
        """Changes what the status is made from. facts: the fields that have changed."""
        self.facts = replace(self.facts, **facts)

    def begin(self) -> None:
        """A coordinator is created: what was counted before it is added to what it counts.

        Costs are counted all the time, with and without one.
        """
        before = self.facts.earlier
        self.update(
            earlier=replace(EarlierCounts.of(self.written), cost=before.cost, repeated_cost=before.repeated_cost),
            finish=None,
            plan=None,
            startup_problems=(),
            unattended=False,
            rollout=None,
        )

    @property
    def over(self) -> bool:
        """Is the end of the job written down?"""
        return _is_over(self.written)

    @property
    def plan(self) -> str | None:
        """There is one while there are workers that train, perhaps left by another operator."""
        found: str | None = self.written.get("plan")
        return found if trains(found) else None

    @property
    def lost(self) -> frozenset[str]:
        """Workers whose loss is counted, though their pods may still be there."""
        return lost_workers_in(self.written.get("plan"))

    @property
    def created(self) -> int:
        """How many workers were ever created."""
        return int(self.written.get("workersCreated") or 0)

    def progress(self) -> EarlierProgress:
        """How far the job had come when that was written last."""
        training, spec = self.written.get("training") or {}, self.facts.spec
        speed = training.get("samplesPerSecond")
        seconds = spec.training.global_batch_size / speed if spec and speed else None
        return EarlierProgress(step=int(training.get("step") or 0), step_seconds=seconds)

    @property
    def active_deadline(self) -> int | None:
        """Seconds for which the job may be active."""
        return self.facts.spec.active_deadline_seconds if self.facts.spec else None

    def active_left(self) -> float:
        """Seconds for which it still may be; math.inf if there is no limit."""
        started, limit = parsed_time(self.written.get("startTime")), self.active_deadline
        return (started - utc_now()).total_seconds() + limit if started and limit else math.inf

    @property
    def progress_is_due(self) -> bool:
        """Is the newest write long enough ago for another one that tells of nothing but progress?"""
        return time.monotonic() - self._written_at >= PROGRESS_SECONDS

    @property
    def cost_is_due(self) -> bool:
        """Does the status lack costs that it may be told of by now?"""
        if not self.progress_is_due:
            return False
        total = (job_status(None, self.written, self.facts).get("cost") or {}).get("total")
        return total is not None and total != (self.written.get("cost") or {}).get("total")

    async def write(self, status: Status | None, created: int | None = None) -> None:
        """The status, if it is worth a write. Raises what is in API_ERRORS, and JobGone."""
        self.update(now=utc_now())
        new = job_status(status, self.written, self.facts)
        started = self.written.get("startTime") or (self.facts.time if status else None)
        new["startTime"] = None if self.facts.suspended and not _is_over(new) else started
        if _is_over(new):
            new["completionTime"] = self.written.get("completionTime") or self.facts.time
        new["workersCreated"] = created if created is not None else self.written.get("workersCreated")
        new = {key: value for key, value in new.items() if value is not None}
        if self._possible is None and not worth_writing(new, self.written, time.monotonic() - self._written_at):
            return
        before = self.written if self._possible is None else self._possible
        self._possible = either(before, new)
        await self._api.write_status(*self._key, self._uid, merge_patch(new, before))
        if new.get("budgetWarnings") != self.written.get("budgetWarnings"):
            found = rule_input(status, self.written, self.facts).shortfalls()
            self._warnings += budget_warnings(new, self.written, found)
        self.written, self._written_at, self._possible = new, time.monotonic(), None

    def take_warnings(self) -> list[Emit]:
        """What the user is warned of by what was written since this was asked last."""
        found, self._warnings = self._warnings, []
        return found


def _counted_until(status: Mapping[str, Any]) -> datetime | None:
    """The time until which costs were counted; None if they never were, or that is not told, as by an older version."""
    try:
        return parsed_time((status.get("cost") or {}).get("countedUntil"))
    except ValueError:
        return None


def _is_over(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)
