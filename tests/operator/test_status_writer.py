"""Writes of a job's status without an answer, and the facts that an operator reads from an earlier one's status."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.document import job_status
from bamboo_operator.status.writer import StatusWriter
from operator_kit import job
from opsim_server import merged
from status_kit import facts

JOB = JobIdentity(("team", "tiny"), "uid")


class Api:
    """An API server that keeps the job's status, and may fail to answer."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.answers, self.writes = True, 0

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        self.writes += 1
        self.status = merged(self.status, dict(status))
        if not self.answers:
            raise ClusterUnreachable("late")


async def test_a_field_whose_write_was_not_answered_is_removed_too() -> None:
    """If the plan stayed, another operator would take it for the plan of workers that train."""
    api = Api()
    writer = StatusWriter(JOB, {}, api)  # type: ignore[arg-type]
    await writer.write(facts(spec=job()), None)
    api.answers = False
    with pytest.raises(ClusterUnreachable):
        await writer.write(facts(spec=job(), plan='{"epoch":1}'), None)
    assert api.status["plan"] == '{"epoch":1}'
    api.answers = True
    await writer.write(facts(spec=replace(job(), suspend=True)), None)
    assert "plan" not in api.status


async def test_what_may_have_been_written_is_written_over_though_nothing_has_changed_since() -> None:
    api = Api()
    writer = StatusWriter(JOB, {}, api)  # type: ignore[arg-type]
    await writer.write(facts(spec=job()), None)
    before = dict(api.status)
    api.answers = False
    with pytest.raises(ClusterUnreachable):
        await writer.write(facts(spec=job(), plan='{"epoch":1}'), None)
    api.answers = True
    await writer.write(facts(spec=job()), None)
    assert api.status == before
    writes = api.writes
    await writer.write(facts(spec=job()), None)
    assert api.writes == writes, "once is enough"


def test_a_job_counts_as_suspended_once_its_workers_were_told_to_stop() -> None:
    """A job that still has a plan does not count as suspended: its workers train until their state is saved."""
    resting = job_status(None, BambooJobStatus(), facts(spec=replace(job(), suspend=True)))
    saving = msgspec.structs.replace(resting, plan='{"epoch":1}')
    found = [StatusWriter(JOB, written(one), Api()) for one in (BambooJobStatus(), saving, resting)]  # type: ignore[arg-type]
    assert [writer.suspended for writer in found] == [False, False, True]


@pytest.mark.parametrize(
    ("record", "trains", "lost"),
    [
        (None, False, set()),
        ("", False, set()),
        ('{"lost":["a"]}', False, {"a"}),
        ('{"epoch":3,"pipelines":[["a"]],"lost":[]}', True, set()),
        ('{"epoch":3,"pipelines":[["b"]],"lost":["a"]}', True, {"a"}),
        ('{"lost":3}', True, set()),
        ('{"of":"another version"}', True, set()),
        ("nonsense", True, set()),
    ],
)
def test_what_a_former_operator_knew_is_read_from_the_status(record: str | None, trains: bool, lost: set[str]) -> None:
    """A record without pipelines is no plan, but may name lost workers; an unreadable record counts as a plan."""
    writer = StatusWriter(JOB, {"plan": record}, Api())  # type: ignore[arg-type]
    assert (writer.plan is not None, writer.written.plan_record.lost or set()) == (trains, lost)
