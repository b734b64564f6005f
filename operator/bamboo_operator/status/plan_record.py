"""The field `plan` of a job's status: what another operator has to know of a job that trains.

Before there is a plan it has only the workers that were lost before they could join.

JSON: the epoch, each pipeline's owners in the order of stages, a digest of the task, which must not have changed, and
the workers whose pods are still there that are lost or leave by order, and those that have a notice or leave by order
with a part in the plan. The other operator does not count these workers as preempted: one before it has, or they were
not.
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
    """The record of a job that does not train yet."""
    return json.dumps({"lost": sorted(lost)}, separators=(",", ":"))


def trains(record: str | None) -> bool:
    """Is there a plan by which workers train? What cannot be read is of another version, and counts as one."""
    return bool(record) and (_field(record, "lost") is None or _field(record, "pipelines") is not None)


def lost_workers_in(record: str | None) -> frozenset[WorkerId]:
    """None, and what was written by another version or by hand: no worker."""
    return _workers(record, "lost")


def counted_workers_in(record: str | None) -> frozenset[WorkerId]:
    """Return the workers whose preemption was counted with their notice, or which leave by order."""
    return _workers(record, "counted")


def _workers(record: str | None, name: str) -> frozenset[WorkerId]:
    found = _field(record, name)
    return frozenset(one for one in found if isinstance(one, str)) if isinstance(found, list) else frozenset()


def task_digest_in(record: str | None) -> str | None:
    digest = _field(record, "task")
    return digest if isinstance(digest, str) else None


def _field(record: str | None, name: str) -> Any:
    try:
        return json.loads(record or "{}")[name]
    except (ValueError, KeyError, TypeError):
        return None
