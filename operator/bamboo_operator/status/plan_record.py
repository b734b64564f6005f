"""The field `plan` of a job's status: the record of a training job for the next operator.

Before the first plan it has only the workers that were lost before they could join. Otherwise it is JSON with the
epoch, each pipeline's owners in the order of stages, a digest of the task, which must not have changed, and two lists
of workers whose pods still exist: `lost` or leaving by order without a part, and `counted`, under notice or leaving by
order with a part in the plan. The next operator does not count the latter as preempted: an earlier one did, or they
were not.
"""

import json
from collections.abc import Iterable
from typing import Any

from bamboo_core.planning.plan import Plan, WorkerId


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
