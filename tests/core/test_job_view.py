"""The view of a job, from a BambooJob or from a local run."""

import re
from typing import Any

import pytest

from bamboo.terminal import phrases
from bamboo_core.job.status import BambooJobStatus, WorkerCounts
from bamboo_core.view.job_view import view_of, view_of_run
from operator_kit import NOW, said
from operator_kit import job as job_spec
from remote_kit import SPEC, condition, job


def test_a_job_without_a_status_is_pending() -> None:
    body = job()
    del body["status"]
    found = view_of(body)
    assert (found.status.state, found.steps, found.plan, found.exit_code) == ("Pending", 1000, (), None)
    assert "is bamboo-operator running" in (phrases.why_waiting(found) or "")


def test_what_is_null_is_absent() -> None:
    body = job(training=None, cost={"total": None}, spec={**SPEC, "redundancy": None})
    found = view_of(body)
    assert (found.status.training.step, found.steps, found.spec.suspend) == (None, 1000, False)
    assert found.status.cost.total is None


def test_fields_of_another_version_count_as_absent() -> None:
    spec = {**SPEC, "topology": {"stages": "some", "pipelines": 2, "shape": "torus"}, "later": {}}
    found = view_of(job(spec=spec, workers={"ready": 3, "asleep": 1}, mood="good"))
    assert (found.spec.topology.pipelines, found.spec.task.entrypoint) == (2, SPEC["task"]["entrypoint"])
    assert found.status.workers == WorkerCounts(ready=3)


@pytest.mark.parametrize("body", [{}, {"metadata": 3, "spec": [], "status": "x"}, {"metadata": {"name": 1}}])
def test_any_object_has_a_view(body: dict[str, Any]) -> None:
    found = view_of(body)
    assert (found.name, found.status, found.plan, found.exit_code) == ("", BambooJobStatus(), (), None)


@pytest.mark.parametrize(
    "written", [None, "", "{", "[]", "{}", '{"pipelines": 3}', '{"pipelines": [3]}', '{"other": []}']
)
def test_a_plan_that_is_not_understood_is_none(written: str | None) -> None:
    assert view_of(job(plan=written)).plan == ()


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [
        ("Complete", "Complete", 0),
        ("Failed", "TaskFailed", 1),
        ("Failed", "StageLost", 3),
        ("Failed", "WorkersGone", 3),
        ("Failed", "Suspended", 3),
        ("Degraded", "Unprotected", None),
    ],
)
def test_the_outcome_is_an_exit_code(kind: str, reason: str, code: int | None) -> None:
    assert view_of(job(conditions=[condition(kind, True, reason)])).exit_code == code


def test_reasons_that_nothing_can_recover_are_the_coordinators() -> None:
    """UNRECOVERABLE contains exactly the reasons with which the coordinator ends a job as unrecoverable."""
    from pathlib import Path

    import bamboo_core
    from bamboo_core.coordinator.events import RestoreCause
    from bamboo_core.view.job_view import UNRECOVERABLE

    source = "".join(p.read_text() for p in Path(bamboo_core.__file__).parent.rglob("*.py"))
    told = re.findall(r'(?:Outcome\.UNRECOVERABLE|\blost\(turn|_begin_to_look\(turn), "(\w+)"', source)
    assert {*told, *RestoreCause} - {RestoreCause.RESULTS_DIFFER} == set(UNRECOVERABLE)


def test_a_run_of_this_process_has_the_view_of_a_job_on_a_cluster() -> None:
    """The views of a local run and of a BambooJob give the same owners and progress."""
    spec, live = job_spec(), said(grid=((("w0", True), ("w0", True)),), epoch=2)
    local = view_of_run(spec, live, NOW)
    status = {"training": {"step": 3, "steps": 10}, "plan": '{"epoch": 2, "pipelines": [["w0", "w0"]]}'}
    remote = view_of({"metadata": {"name": "tiny"}, "status": status})
    for found in (local, remote):
        assert (found.name, found.step, found.steps, found.status.plan_record.epoch) == ("tiny", 3, 10, 2)
        assert (found.plan, found.doubled, found.cells("w0")) == ((("w0", "w0"),), {"w0"}, ((0, 0), (0, 1)))
    assert (local.live, remote.live) == (live, None)
    assert (view_of_run(spec, None, NOW).steps, view_of_run(spec, None, NOW).plan) == (10, ())
