"""What is written to a job's status although the API server's answers are lost."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.kube.errors import ClusterUnreachable
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.document import job_status
from bamboo_operator.status.writer import StatusWriter, lost_workers_in, start_record, task_digest_in, trains
from operator_kit import job, said
from opsim_server import merged
from status_kit import facts

JOB = JobIdentity(("team", "tiny"), "uid")


class Api:
    """Keeps the status, and answers or not."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.answers, self.writes = True, 0

    async def write_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> None:
        self.writes += 1
        self.status = merged(self.status, dict(status))
        if not self.answers:
            raise ClusterUnreachable("late")


async def test_a_field_whose_write_was_not_answered_is_removed_too() -> None:
    """Another operator would take the plan for that of workers that train."""
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
    """The workers of one that still has a plan train on until their state is saved."""
    resting = job_status(None, BambooJobStatus(), facts(spec=replace(job(), suspend=True)))
    saving = msgspec.structs.replace(resting, plan='{"epoch":1}')
    found = [StatusWriter(JOB, written(one), Api()) for one in (BambooJobStatus(), saving, resting)]  # type: ignore[arg-type]
    assert [writer.suspended for writer in found] == [False, False, True]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_field_within_another_one_is_removed_when_it_is_not_there_any_more(answered: bool) -> None:
    api = Api()
    writer = StatusWriter(JOB, {}, api)  # type: ignore[arg-type]
    known = facts(spec=job())
    await writer.write(known, said(loss=math.nan, steps=11))
    api.answers = answered
    with nullcontext() if answered else pytest.raises(ClusterUnreachable):
        await writer.write(known, said(steps=12))
    assert api.status["training"]["loss"] == 4.0
    api.answers = True
    await writer.write(known, said(loss=math.nan, steps=13))
    assert "loss" not in api.status["training"]
    assert api.status == written(writer.written)


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (None, set()),
        ("{}", set()),
        ("nonsense", set()),
        ('{"lost": 3}', set()),
        ("[]", set()),
        ('{"epoch": 3, "pipelines": [], "lost": ["a", 4]}', {"a"}),
    ],
)
def test_what_a_former_operator_had_heard_is_read_from_the_status(plan: str | None, lost: set[str]) -> None:
    assert lost_workers_in(plan) == lost


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (None, False),
        ("", False),
        (start_record({"a"}), False),
        ('{"epoch":3,"pipelines":[["a"]],"lost":[]}', True),
        ('{"of":"another version"}', True),
        ("nonsense", True),
    ],
)
def test_a_record_of_workers_that_never_joined_is_no_plan(record: str | None, found: bool) -> None:
    assert trains(record) == found


def test_a_job_that_does_not_train_has_no_task_yet() -> None:
    assert task_digest_in(start_record({"b", "a"})) is None
    assert lost_workers_in(start_record({"b", "a"})) == {"a", "b"}
