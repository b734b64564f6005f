"""Who is looked after, in any order of events and whichever are missed; the API server is a small one of ours."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import kopf
import pytest
from aiohttp import web
from kopf._core.actions.lifecycles import all_at_once
from kopf._core.engines.indexing import OperatorIndexers
from kopf._core.reactor.inventory import ResourceMemories
from kopf._core.reactor.processing import process_resource_event

from bamboo.kube.errors import ApiError
from bamboo.kube.kubeconfig import Access, ClusterServer, User
from bamboo_operator.auth.pod_tokens import TokenReviewer
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster import resync
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.cluster.resync import Resync
from bamboo_operator.jobs.controller import JobController
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.jobs.watch_handlers import kopf_settings, watch_handlers
from bamboo_operator.kube import client as api_module
from bamboo_operator.kube.api_calls import ApiCallCounts
from bamboo_operator.kube.client import ApiClient, connect
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from http_kit import serving
from manifest_kit import minimal

KEY = ("default", "test")
EARLY, LATE = "2026-03-01T12:00:00Z", "2026-03-01T12:00:05Z"


class Server:
    """uids: of the BambooJobs that there are. namespaces: in which pods can be made."""

    def __init__(self) -> None:
        self.uids: dict[tuple[str, str], str] = {}
        self.namespaces = {"default"}
        self.asked: list[str] = []
        self.events: list[tuple[str, str]] = []  # reasons and messages

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        parts = request.path.split("/")
        namespace = parts[parts.index("namespaces") + 1]
        if parts[-1] == "pods":
            found = namespace in self.namespaces
            return web.json_response(
                {} if found else {"reason": "NotFound", "message": "no such namespace"}, status=201 if found else 404
            )
        if parts[-1] == "events":
            event = await request.json()
            self.events.append((event["reason"], event["message"]))
            return web.json_response({}, status=201)
        if parts[-1] == "status":
            return web.json_response({})
        uid = self.uids.get((namespace, parts[-1]))
        return web.json_response(
            {"metadata": {"uid": uid}} if uid else {"reason": "NotFound"}, status=200 if uid else 404
        )


@asynccontextmanager
async def sharing(server: Server) -> AsyncIterator[SharedResources]:
    async with serving(server.answer) as url:
        connection = connect(Access(context="test", server=ClusterServer(url=url), user=User()), ApiCallCounts(), 32)
        api = ApiClient(connection)
        try:
            yield SharedResources(
                cluster=ClusterCache(), gateway=WorkerGateway(), api=api, reviews=TokenReviewer(api), key=b"k" * 16,
                url="ws://127.0.0.1:1", settings=WorkerPodSettings(coordinator_url="", image="bamboo-trainer"),
            )  # fmt: skip
        finally:
            await connection.close()


@asynccontextmanager
async def managed(server: Server) -> AsyncIterator[JobController]:
    async with sharing(server) as shared:
        jobs = JobController(shared)
        try:
            yield jobs
        finally:
            await jobs.stop()


def body(uid: str, made: str = EARLY, **spec: Any) -> dict[str, Any]:
    document = minimal()
    metadata = {**document["metadata"], "namespace": KEY[0], "name": KEY[1], "uid": uid, "generation": 1}
    return {**document, "metadata": {**metadata, "creationTimestamp": made}, "spec": {**document["spec"], **spec}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def uids(jobs: JobController) -> list[str]:
    return [job.uid for job in jobs.running()]


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


def test_a_deletion_that_was_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_SECONDS", 0.05)
    server = Server()

    async def check() -> None:
        async with managed(server) as jobs:
            jobs.job_event("ADDED", body("old", suspend=True))
            other = body("other", suspend=True)
            other["metadata"]["name"] = "other"
            jobs.job_event(None, other)  # a listing in which the first one is not
            await until(lambda: uids(jobs) == ["other"])
            assert [line for line in server.asked if line.startswith("GET")] == [
                "GET /apis/bamboo.dev/v1alpha1/namespaces/default/bamboojobs/test"
            ]

    asyncio.run(check())


def test_a_job_goes_with_its_namespace() -> None:
    server = Server()
    server.namespaces.clear()

    async def check() -> None:
        async with managed(server) as jobs:
            jobs.job_event("ADDED", body("lonely"))
            await until(lambda: not jobs.running() and jobs.view(KEY) is None)

    asyncio.run(check())


class Things:
    """there: what there is; known: what is thought to be; both uids by name."""

    def __init__(self, there: dict[str, str], known: dict[str, str], failures: int = 0) -> None:
        self.there, self.known, self.failures = there, known, failures
        self.asked: list[str] = []
        self.resync = Resync(lambda: self.known, self._uid_of, lambda name: self.known.pop(name))

    async def _uid_of(self, name: str) -> str | None:
        self.asked.append(name)
        if self.failures:
            self.failures -= 1
            raise ApiError(503, "ServiceUnavailable", "busy")
        return self.there.get(name)


def listed(things: Things, script: Callable[[Things], Awaitable[None]]) -> Things:
    async def play() -> None:
        await script(things)
        await until(
            lambda: things.resync._timer is None and (things.resync._checking is None or things.resync._checking.done())
        )
        await things.resync.stop()

    asyncio.run(play())
    return things


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SETTLE_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_only_what_was_not_listed_is_asked_for() -> None:
    async def script(things: Things) -> None:
        for name in ("a", "b"):
            things.resync.observed(None, name)

    things = listed(Things({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "2", "c": "3", "d": "4"}), script)
    assert (things.asked, sorted(things.known)) == (["c", "d"], ["a", "b", "c"])


@pytest.mark.usefixtures("quick")
def test_a_watch_without_interruption_asks_for_nothing() -> None:
    async def script(things: Things) -> None:
        things.resync.observed(None, "a")
        await asyncio.sleep(0.2)
        for kind in ("MODIFIED", "MODIFIED", "DELETED"):
            things.resync.observed(kind, "a")
        things.resync.observed("ADDED", "b")
        await asyncio.sleep(0.2)

    assert listed(Things({}, {"a": "1"}), script).asked == []


@pytest.mark.usefixtures("quick")
def test_another_object_of_that_name_is_not_the_one_that_was_known() -> None:
    async def script(things: Things) -> None:
        things.resync.observed(None, "a")

    assert listed(Things({"a": "1", "b": "new"}, {"a": "1", "b": "old"}), script).known == {"a": "1"}


@pytest.mark.usefixtures("quick")
async def test_an_answer_says_nothing_of_a_later_listing() -> None:
    class Late(Things):
        async def _uid_of(self, name: str) -> str | None:
            found = await super()._uid_of(name)
            await answer.wait()
            return found

    answer, things = asyncio.Event(), Late({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    things.resync.observed(None, "a")
    await until(lambda: things.asked == ["b"])
    del things.there["b"]
    things.resync.observed(None, "a")  # listed again, without b, before the answer is here
    answer.set()
    await until(lambda: "b" not in things.known)
    await things.resync.stop()


@pytest.mark.usefixtures("quick")
def test_an_api_server_that_is_busy_is_asked_again() -> None:
    async def script(things: Things) -> None:
        things.resync.observed(None, "a")
        await until(lambda: "b" not in things.known)

    things = listed(Things({"a": "1"}, {"a": "1", "b": "2"}, failures=2), script)
    assert (things.asked, things.known) == (["b", "b", "b"], {"a": "1"})


# edits


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
        reconciler = jobs._reconcilers[KEY][0]
        await until(lambda: reconciler._runner is not None)
        assert reconciler._runner is not None
        assert reconciler._runner.state.spec.training.steps == 7
        assert reconciler._runner.state.manifest["spec"]["training"]["steps"] == 7


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
        runner = jobs._reconcilers[KEY][0]._runner
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
        status = jobs._reconcilers[KEY][0]._status.written
    async with managed(server) as jobs:
        jobs.job_event("ADDED", {**wrong, "status": status})
        reconciler = jobs._reconcilers[KEY][0]
        await until(lambda: reconciler._spec._reported != "" and bool(reconciler._status.facts.problems))
        again = body("u1", topology={"stages": "many"})
        again["metadata"]["generation"] = 2
        jobs.job_event("MODIFIED", {**again, "status": status})
        await until(lambda: len(server.events) > 1)
    assert [reason for reason, _ in server.events] == ["InvalidSpec", "InvalidSpec"]
    assert server.events[1] != server.events[0], "what was told before is not told again"


class Uncopied(dict[str, Any]):
    """A part of an object of which nobody needs a copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("it was copied")


async def test_kopf_copies_nothing_of_what_it_watches() -> None:
    """To find out what has changed, which no handler asks, it would copy every object at each of its events."""
    taints = [{"key": "going", "effect": "NoSchedule"}]
    metadata = {"name": "node-1", "uid": "u", "managedFields": Uncopied()}
    node = {"type": "MODIFIED", "object": {"metadata": metadata, "spec": Uncopied(taints=taints)}}
    async with sharing(Server()) as shared:
        jobs = JobController(shared)
        handlers, indexers = watch_handlers(jobs, shared), OperatorIndexers()
        indexers.ensure(handlers._indexing.get_all_handlers())
        await process_resource_event(
            lifecycle=all_at_once, indexers=indexers, registry=handlers, settings=kopf_settings(),
            memories=ResourceMemories(), memobase=kopf.Memo(), resource=kopf.Resource("", "v1", "nodes"),
            event_queue=asyncio.Queue(), raw_event=cast(Any, node),
        )  # fmt: skip
        await jobs.stop()
    assert shared.cluster.nodes["node-1"]["spec"]["taints"] == taints
    assert shared.counts.watched == {"node": 1}
