"""Runtimes as the operator sees them: which jobs hear of a change, and what is written into their status."""

import asyncio
from typing import Any

import pytest

from bamboo_core.job.spec import RuntimeKind
from bamboo_core.kube.errors import ApiError
from bamboo_operator.cluster.runtimes import RuntimeCache, RuntimeKey, listable_kinds
from bamboo_operator.kube import attempts
from watched_api_kit import Server, body, managed

SPOT = RuntimeKey("ClusterBambooRuntime", "", "spot")


def runtime(generation: int = 1, *, uid: str = "r1", namespace: str | None = None, **job: Any) -> dict[str, Any]:
    metadata = {"name": "spot", "uid": uid, "generation": generation, "labels": {"a": "b"}, "anything": 1}
    return {"metadata": {**metadata, **({"namespace": namespace} if namespace else {})}, "spec": {"job": job}}


class Api:
    """failures: of writes, in turn."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.written = list(failures), list[tuple[Any, ...]]()

    async def write_runtime_status(self, *said: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.written.append(said)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(attempts, "FIRST_RETRY", 0.0)
    return Api()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_what_is_another_runtime_for_jobs_is_a_change(api: Any) -> None:
    cache, changed = RuntimeCache(api), list[RuntimeKey]()
    cache.changed = changed.append
    event = cache.event
    event(RuntimeKind.CLUSTER, None, runtime())
    event(RuntimeKind.CLUSTER, "MODIFIED", {**runtime(), "status": {"observedGeneration": 1}})
    assert changed == [SPOT]
    event(RuntimeKind.CLUSTER, "MODIFIED", runtime(2, queue={"name": "q"}))
    event(RuntimeKind.NAMESPACE, "ADDED", runtime(namespace="team"))
    assert changed == [SPOT, SPOT, RuntimeKey("BambooRuntime", "team", "spot")]
    event(RuntimeKind.CLUSTER, "DELETED", runtime(uid="older"))
    assert cache.get(SPOT) is not None
    assert cache.uids() == {SPOT: "r1", RuntimeKey("BambooRuntime", "team", "spot"): "r1"}
    event(RuntimeKind.CLUSTER, "DELETED", runtime())
    assert (cache.get(SPOT), changed[-1]) == (None, SPOT)
    await cache.stop()


async def test_a_status_says_whether_jobs_can_be_run_with_it_and_is_written_once(api: Any) -> None:
    api.failures = [TimeoutError(), ApiError(500, "InternalError", "")]
    cache = RuntimeCache(api)
    cache.event(RuntimeKind.NAMESPACE, "ADDED", runtime(namespace="team"))
    await asyncio.wait_for(until(lambda: api.written), 30)
    ((kind, namespace, name, uid, status),) = api.written
    assert (kind, namespace, name, uid) == ("BambooRuntime", "team", "spot", "r1")
    (accepted,) = status["conditions"]
    assert (status["observedGeneration"], accepted["status"], accepted["reason"]) == (1, "True", "Accepted")
    cache.event(RuntimeKind.NAMESPACE, "MODIFIED", {**runtime(namespace="team"), "status": status})
    otherwise = {**status, "conditions": [{**accepted, "status": "False"}]}
    cache.event(RuntimeKind.NAMESPACE, "MODIFIED", {**runtime(namespace="team"), "status": otherwise})
    await settle()
    assert len(api.written) == 1, "two operators that do not agree write once each"
    wrong = {**runtime(2, namespace="team", standby={"workers": 1}), "status": status}
    cache.event(RuntimeKind.NAMESPACE, "MODIFIED", wrong)
    await asyncio.wait_for(until(lambda: len(api.written) == 2), 30)
    (refused,) = api.written[1][4]["conditions"]
    assert (refused["status"], refused["reason"], refused["observedGeneration"]) == ("False", "InvalidSpec", 2)
    assert refused["message"] == "spec.job.standby: unknown field"
    await cache.stop()


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def test_a_status_that_may_not_be_written_is_given_up(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    api.failures = [ApiError(403, "Forbidden", "no right")]
    cache = RuntimeCache(api)
    cache.event(RuntimeKind.CLUSTER, "ADDED", runtime())
    await asyncio.wait_for(until(lambda: "cannot write the status of ClusterBambooRuntime spot" in caplog.text), 30)
    assert api.written == []
    await cache.stop()


async def test_a_change_wakes_exactly_the_jobs_that_name_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    async with managed(Server()) as jobs:
        woken: list[str] = []
        for name, ref in (("a", {"name": "spot"}), ("b", {"name": "other"}), ("c", None)):
            document = body(f"uid-{name}", **({"runtimeRef": ref} if ref else {}), suspend=True)
            document["metadata"]["name"] = name
            jobs.job_event("ADDED", document)
        for job in jobs.running():
            monkeypatch.setattr(job, "_look_again", lambda name=job.key[1]: woken.append(name))
        jobs._shared.runtimes.event(RuntimeKind.CLUSTER, "ADDED", runtime())  # noqa: SLF001
        assert woken == ["a"]


class Lister:
    """refused: what is raised for a kind that is listed, and which ones were, with their namespaces."""

    def __init__(self, **refused: Exception) -> None:
        self._refused = refused
        self.asked: list[tuple[str, str]] = []

    async def list_runtimes(self, kind: str, namespace: str) -> list[Any]:
        self.asked.append((str(kind), namespace))
        if (error := self._refused.get(str(kind))) is not None:
            raise error
        return []


async def test_kinds_that_an_older_charts_rights_do_not_know_are_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    forbidden = ApiError(403, "Forbidden", "you may not list them")
    lister = Lister(ClusterBambooRuntime=forbidden)
    assert await listable_kinds(lister, "team") == (RuntimeKind.NAMESPACE,)  # type: ignore[arg-type]
    assert sorted(lister.asked) == [("BambooRuntime", "team"), ("ClusterBambooRuntime", "")]
    assert caplog.messages == ["no ClusterBambooRuntime is followed: you may not list them"]
    assert await listable_kinds(Lister(BambooRuntime=forbidden, ClusterBambooRuntime=forbidden), "") == ()  # type: ignore[arg-type]


async def test_what_may_pass_keeps_no_kind_from_being_watched() -> None:
    lister = Lister(BambooRuntime=TimeoutError(), ClusterBambooRuntime=ApiError(500, "InternalError", ""))
    assert await listable_kinds(lister, "") == tuple(RuntimeKind)  # type: ignore[arg-type]
