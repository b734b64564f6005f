"""Who is looked after, in any order of events and whichever are missed."""

import asyncio
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from bamboo_core.job.api_object import written
from bamboo_core.names import LABEL_JOB_NAME, shard_of
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.kube import client as api_module
from watched_api_kit import EARLY, KEY, LATE, Server, body, managed, sharing, uids, until


@pytest.mark.parametrize("made", [EARLY, LATE])
def test_a_job_made_anew_under_its_name_is_managed(made: str) -> None:
    """Events of two jobs with one name come in any order."""

    async def check() -> None:
        async with managed(Server()) as jobs:
            jobs.job_event("ADDED", body("old"))
            jobs.job_event("ADDED", body("new", made))
            assert uids(jobs) == ["new"]
            for kind in ("MODIFIED", "DELETED", "MODIFIED"):
                jobs.job_event(kind, body("old"))
                assert uids(jobs) == ["new"]
            jobs.job_event("DELETED", body("new", made))
            await asyncio.sleep(0)
            assert uids(jobs) == []

    asyncio.run(check())


def test_what_a_listing_shows_replaces_what_was_there() -> None:
    async def check() -> None:
        async with managed(Server()) as jobs:
            jobs.job_event("ADDED", body("old"))
            jobs.job_event(None, body("new"))
            assert uids(jobs) == ["new"]

    asyncio.run(check())


def test_a_job_goes_with_its_namespace() -> None:
    server = Server()
    server.namespaces.clear()

    async def check() -> None:
        async with managed(server) as jobs:
            jobs.job_event("ADDED", body("lonely"))
            await until(lambda: not jobs.running() and jobs.known(KEY) is None)

    asyncio.run(check())


class Checking(Server):
    """Takes its time for dry runs."""

    def __init__(self) -> None:
        super().__init__()
        self.checks, self.go = 0, asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if "dryRun" in request.query:
            self.checks += 1
            await self.go.wait()
        return await super().answer(request)


async def begins_with(jobs: JobController, *, steps: int) -> None:
    """Waits until the only job trains; what its coordinator goes by, and what is kept of it, say so many steps."""
    (job,) = jobs.running()
    await until(lambda: job.runner is not None)
    assert job.runner is not None
    assert job.runner.state.spec.training.steps == steps
    assert job.runner.state.terms.manifest["spec"]["training"]["steps"] == steps


async def test_an_edit_that_comes_while_the_pod_template_is_checked_is_what_the_job_begins_with() -> None:
    server = Checking()
    async with managed(server) as jobs:
        first = body("u1")
        jobs.job_event("ADDED", first)
        await until(lambda: server.checks == 1)
        second = body("u1", training={**first["spec"]["training"], "steps": 7})
        second["metadata"]["generation"] = 2
        jobs.job_event("MODIFIED", second)
        server.go.set()
        await begins_with(jobs, steps=7)


class Queueing(Server):
    """Takes its time to make a Workload of Kueue, which is admitted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.workload: dict[str, Any] = {}
        self.asks, self.go = 0, asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if "/workloads" not in request.path:
            return await super().answer(request)
        if request.method == "POST":
            self.asks += 1
            await self.go.wait()
            self.workload = await request.json()
            self.workload["metadata"] |= {"uid": "w1", "resourceVersion": "1"}
            admitted = [{"type": one, "status": "True"} for one in ("QuotaReserved", "Admitted")]
            sets = [{"name": one["name"], "count": one["count"]} for one in self.workload["spec"]["podSets"]]
            self.workload["status"] = {"conditions": admitted, "admission": {"podSetAssignments": sets}}
        else:
            self.workload["status"] |= (await request.json())["status"]
        return web.json_response(self.workload)


async def test_an_edit_that_comes_while_the_queue_is_asked_is_what_the_job_begins_with() -> None:
    server = Queueing()
    async with sharing(server) as shared:
        shared.workloads.version = "v1beta2"
        jobs = JobController(shared)
        first = body("u1", queue={"name": "q"})
        jobs.job_event("ADDED", first)
        await until(lambda: server.asks == 1)
        second = body("u1", queue={"name": "q"}, training={**first["spec"]["training"], "steps": 7})
        second["metadata"]["generation"] = 2
        jobs.job_event("MODIFIED", second)
        server.go.set()
        await begins_with(jobs, steps=7)
        await jobs.stop()


class Silent(Server):
    """Does not answer who writes a status."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.go = 0, asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/status"):
            self.writes += 1
            await self.go.wait()
        return await super().answer(request)


async def test_a_suspension_is_handled_while_the_api_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the watch tells goes to the coordinator at once, and not with the next reconciliation."""
    monkeypatch.setattr(api_module, "TIMEOUT_SECONDS", 600.0)
    server = Silent()
    async with managed(server) as jobs:
        jobs.job_event("ADDED", body("u1"))
        await until(lambda: server.writes == 1)
        second = body("u1", suspend=True)
        second["metadata"]["generation"] = 2
        jobs.job_event("MODIFIED", second)
        (job,) = jobs.running()
        runner = job.runner
        assert runner is not None
        assert runner.ending
        await until(lambda: runner.finish is not None)
        assert server.writes == 1
        server.go.set()


async def test_a_manifest_that_is_not_valid_is_told_by_an_event_once_over_operators() -> None:
    server = Server()
    wrong = body("u1", topology={"stages": 0})
    async with managed(server) as jobs:
        jobs.job_event("ADDED", wrong)
        await until(lambda: bool(server.events))
        ((reason, message),) = server.events
        assert reason == "InvalidSpec"
        assert message.startswith("spec.topology.stages")
        before = jobs.known(KEY)
        assert before is not None
    async with managed(server) as jobs:
        jobs.job_event("ADDED", {**wrong, "status": written(before.view.status)})
        await until(lambda: bool((known := jobs.known(KEY)) and known.facts.problems))
        again = body("u1", topology={"stages": "many"})
        again["metadata"]["generation"] = 2
        jobs.job_event("MODIFIED", {**again, "status": written(before.view.status)})
        await until(lambda: len(server.events) > 1)
    assert [reason for reason, _ in server.events] == ["InvalidSpec", "InvalidSpec"]
    assert server.events[1] != server.events[0], "what was told before is not told again"


class Divided(Server):
    """Has jobs, each with a pod that is not to be made again and a Workload of Kueue, and a node."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        super().__init__()
        self.bodies = list(jobs)

    async def answer(self, request: web.Request) -> web.Response:
        kind, owner = request.path.rpartition("/")[2], self.bodies[0]["metadata"]
        labels = {LABEL_JOB_NAME: owner["name"]}
        references = [{"kind": "BambooJob", "uid": owner["uid"], "controller": True}]
        owned = {"namespace": owner["namespace"], "labels": labels, "ownerReferences": references}
        lists = {
            "bamboojobs": self.bodies,
            "pods": [{"metadata": {**owned, "name": "test-w0", "uid": "p0"}, "spec": {"nodeName": "n"}}],
            "nodes": [{"metadata": {"name": "n", "uid": "n0"}}],
            "workloads": [{"metadata": {**owned, "name": "bamboo-test-3", "uid": "w3"}}],
        }
        if request.method == "GET" and kind in lists:
            return web.json_response({"items": lists[kind]})
        return await super().answer(request)


def in_namespace(namespace: str, uid: str = "u1") -> dict[str, Any]:
    found = body(uid, suspend=True)
    return {**found, "metadata": {**found["metadata"], "namespace": namespace, "managedFields": [{"manager": "x"}]}}


OURS = next(f"team-{number}" for number in count() if shard_of(f"team-{number}", 2) == 1)
THEIRS = next(f"team-{number}" for number in count() if shard_of(f"team-{number}", 2) == 0)


async def test_of_several_operators_one_looks_after_the_jobs_of_its_shards() -> None:
    """What is not its own it only remembers, and takes over as the API server has it then."""
    first = in_namespace(OURS)
    server = Divided(first)
    async with sharing(server) as shared:
        jobs = JobController(shared, 2)
        jobs.job_event("ADDED", {**first, "status": {"state": "Old"}})
        jobs.job_event("ADDED", in_namespace(THEIRS, "u2"))
        assert uids(jobs) == []
        assert {(job.namespace, job.uid) for job in jobs.others()} == {(OURS, "u1"), (THEIRS, "u2")}
        spec = jobs.spec((OURS, KEY[1]))
        assert spec is not None
        assert spec.suspend

        server.bodies = [{**first, "status": {"state": "New"}}, in_namespace(THEIRS, "u2")]
        await jobs.take(1, ())
        assert uids(jobs) == ["u1"]
        assert jobs.running()[0].body["status"] == {"state": "New"}
        assert (list(shared.cluster.pods((OURS, KEY[1]), "u1")), list(shared.cluster.nodes)) == (["test-w0"], ["n"])
        assert [job.uid for job in jobs.others()] == ["u2"]

        await jobs.give(1)
        assert uids(jobs) == []
        assert shared.cluster.listener_of((OURS, KEY[1])) is None
        assert {job.uid for job in jobs.others()} == {"u1", "u2"}
        jobs.job_event("DELETED", first)
        jobs.job_event("DELETED", in_namespace(THEIRS, "another"))
        assert [job.uid for job in jobs.others()] == ["u2"]
        await jobs.stop()


async def test_a_job_is_taken_over_with_its_workloads_though_no_watch_has_told_of_them() -> None:
    """Else it would be suspended until a second Workload is admitted."""
    async with sharing(Divided(in_namespace(OURS))) as shared:
        shared.workloads.version = "v1beta2"
        jobs = JobController(shared, 2)
        await jobs.take(1, ())
        assert uids(jobs) == ["u1"]
        (found,) = shared.workloads.of((OURS, KEY[1]), "u1")
        assert (found["metadata"]["uid"], found["apiVersion"]) == ("w3", "kueue.x-k8s.io/v1beta2")
        await jobs.stop()


async def test_what_the_watch_has_told_meanwhile_is_not_forgotten() -> None:
    """An edit that is newer than the list, and a job that is not in it yet."""
    edited = in_namespace(OURS)
    edited["metadata"]["generation"] = 2
    new = in_namespace(OURS, "u3")
    new["metadata"]["name"] = "new"
    server = Divided(in_namespace(OURS))
    async with sharing(server) as shared:
        jobs = JobController(shared, 2)
        jobs.job_event("MODIFIED", edited)
        jobs.job_event("ADDED", new)
        await jobs.take(1, [OURS])
        assert {job.uid: job.body["metadata"]["generation"] for job in jobs.running()} == {"u1": 2, "u3": 1}
        await jobs.stop()
