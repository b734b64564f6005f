"""The jobs that an operator manages: new and deleted ones, and edits while the API server does not answer."""

import asyncio
from typing import Any

import pytest

from bamboo_operator.jobs.controller import JobController
from waiting import in_time
from watched_api_kit import EARLY, LATE, Server, body, job_event, managed, uids


@pytest.mark.parametrize("made", [EARLY, LATE])
def test_a_job_made_anew_under_its_name_is_managed(made: str) -> None:
    """Late watch events of the old job do not affect the new one, even if both were made in the same second."""

    async def check() -> None:
        async with managed(Server()) as jobs:
            job_event(jobs, "ADDED", body("old"))
            job_event(jobs, "ADDED", body("new", made))
            assert uids(jobs) == ["new"]
            for kind in ("MODIFIED", "DELETED", "MODIFIED"):
                job_event(jobs, kind, body("old"))
                assert uids(jobs) == ["new"]
            job_event(jobs, "DELETED", body("new", made))
            await asyncio.sleep(0)
            assert uids(jobs) == []

    asyncio.run(check())


async def test_of_a_job_that_a_finalizer_keeps_nothing_runs_by_its_status() -> None:
    """The operator stops managing a job that only a finalizer keeps; the job's status says that nothing runs."""
    server = Server()
    async with managed(server) as jobs:
        job_event(jobs, "ADDED", body("u1"))
        await in_time(lambda: "Running" in server.conditions)
        deleted = body("u1")
        deleted["metadata"] |= {"deletionTimestamp": LATE, "finalizers": ["example.com/kept"]}
        for _ in range(2):
            job_event(jobs, "MODIFIED", deleted)
        assert uids(jobs) == []
        for kind in ("Running", "WorkersReady", "Degraded", "Protected"):
            await in_time(lambda kind=kind: server.conditions[kind] == ("False", "JobDeleted"))
        assert server.conditions["Accepted"] == ("True", "Accepted")


STATUS_WRITE = "PATCH /apis/bamboo.dev/v1alpha1/namespaces/default/bamboojobs/test/status"
RAN = [
    {"type": kind, "status": status, "reason": kind, "message": "", "lastTransitionTime": EARLY}
    for kind, status in (("Accepted", "True"), ("Running", "True"), ("Protected", "True"), ("Complete", "False"))
]


async def test_of_a_job_that_is_deleted_while_no_operator_is_active_nothing_runs_by_its_status() -> None:
    """A starting operator lists the deleted job and writes its status once, though the watch reports that write."""
    server = Server()
    async with managed(server) as jobs:
        deleted = body("u1")
        deleted["metadata"] |= {"deletionTimestamp": LATE, "finalizers": ["example.com/kept"]}
        deleted["status"] = {"observedGeneration": 1, "state": "Running", "conditions": RAN}
        for kind in (None, "MODIFIED"):
            job_event(jobs, kind, deleted)
        await in_time(lambda: server.conditions.get("Running") == ("False", "JobDeleted"))
        assert uids(jobs) == []
        assert server.conditions["Protected"] == ("False", "JobDeleted")
        assert server.conditions["Accepted"] == ("True", "Accepted")
        assert server.asked.count(STATUS_WRITE) == 1
        deleted["status"] = {key: value for key, value in server.status.items() if value is not None}
        job_event(jobs, "MODIFIED", deleted)
        await in_time(lambda: not any(task.get_name().startswith("deletion") for task in asyncio.all_tasks()))
        assert server.asked.count(STATUS_WRITE) == 1


class Silent(Server):
    """An API server that delays calls to paths with the suffix `end` until `go` is set. held: number of such calls."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end, self.held, self.go = end, 0, asyncio.Event()

    async def call(self, method: str, path: str, *more: Any, **query: Any) -> dict[str, Any]:
        if path.endswith(self.end):
            self.held += 1
            await self.go.wait()
        return await super().call(method, path, *more, **query)


async def begins_with(jobs: JobController, *, steps: int) -> None:
    """Wait until the only job has a coordinator, and check the steps in the coordinator's spec and manifest."""
    (job,) = jobs.running()
    await in_time(lambda: job.runner is not None)
    assert job.runner is not None
    assert job.runner.state.spec.training.steps == steps
    assert job.runner.state.terms.manifest["spec"]["training"]["steps"] == steps


async def test_an_edit_that_comes_while_the_pod_template_is_checked_is_what_the_job_begins_with() -> None:
    server = Silent("/pods")
    async with managed(server) as jobs:
        first = body("u1")
        job_event(jobs, "ADDED", first)
        await in_time(lambda: server.held == 1)
        second = body("u1", training={**first["spec"]["training"], "steps": 7})
        second["metadata"]["generation"] = 2
        job_event(jobs, "MODIFIED", second)
        server.go.set()
        await begins_with(jobs, steps=7)


async def test_a_suspension_is_handled_while_the_api_server_does_not_answer() -> None:
    """The coordinator gets an edit from the watch at once, not with the next reconciliation."""
    server = Silent("/status")
    async with managed(server) as jobs:
        job_event(jobs, "ADDED", body("u1"))
        await in_time(lambda: server.held == 1)
        second = body("u1", suspend=True)
        second["metadata"]["generation"] = 2
        job_event(jobs, "MODIFIED", second)
        (job,) = jobs.running()
        runner = job.runner
        assert runner is not None
        assert runner.ending
        await in_time(lambda: runner.finish is not None)
        assert server.held == 1
        server.go.set()
