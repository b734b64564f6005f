"""Watches that end, or have not begun, are missed."""

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

from bamboo_operator.cluster.watch_health import LOGIN, KopfRepetitions, WatchHealth
from http_kit import serving


async def test_a_namespace_that_is_deleted_needs_no_watchers() -> None:
    watchers = WatchHealth()
    names = [f"watcher for {kind}.v1@{place}" for place in ("a", "b") for kind in ("pods", "bamboojobs")]
    tasks = {name: asyncio.create_task(asyncio.sleep(60), name=name) for name in names}
    assert watchers.problem() is None
    for name in names[:2]:
        tasks[name].cancel()
    await asyncio.gather(*(tasks[name] for name in names[:2]), return_exceptions=True)
    assert watchers.problem() is None
    tasks[names[2]].cancel()
    await asyncio.gather(tasks[names[2]], return_exceptions=True)
    assert watchers.problem() == "the watcher for pods.v1@b has ended"
    tasks[names[3]].cancel()


async def test_a_watcher_that_ends_is_missed() -> None:
    watchers = WatchHealth()
    assert watchers.problem() is None
    watcher = asyncio.create_task(asyncio.sleep(60), name="watcher for nodes.v1@None")
    other = asyncio.create_task(asyncio.sleep(60), name="something else")
    assert watchers.problem() is None
    for task in (other, watcher):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (watchers.problem() is None) == (task is other)
    assert watchers.problem() == "the watcher for nodes.v1@None has ended"


async def test_an_operator_that_began_before_the_api_server_served_jobs_is_not_well() -> None:
    now = 0.0
    watchers = WatchHealth(lambda: now)
    pods = asyncio.create_task(asyncio.sleep(60), name="watcher for pods.v1@None")
    assert watchers.problem() is None
    now = 59.0
    assert watchers.problem() is None
    now = 61.0
    assert "BambooJobs are not watched" in (watchers.problem() or "")
    jobs = asyncio.create_task(asyncio.sleep(60), name="watcher for bamboojobs.v1alpha1.bamboo.dev@None")
    await asyncio.sleep(0)
    assert watchers.problem() is None
    for task in (pods, jobs):
        task.cancel()


async def test_every_watch_has_to_list_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """What the API server refuses kopf asks again, for an hour and with a watcher that lives."""
    caplog.set_level(logging.INFO)
    refusing, watchers = True, WatchHealth()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=403 if refusing else 200)

    assert watchers.unlisted() == "waiting for the watch of BambooJobs"
    names = [
        "nodes.v1@None",
        *(f"{kind}@{place}" for kind in ("bamboojobs.v1alpha1.bamboo.dev", "pods.v1") for place in "ab"),
    ]
    tasks = [asyncio.create_task(asyncio.sleep(60), name=f"watcher for {name}") for name in names]
    group = "apis/bamboo.dev/v1alpha1"
    paths = [
        "api/v1/nodes",
        *(
            f"{at}/namespaces/{place}/{kind}"
            for at, kind in ((group, "bamboojobs"), ("api/v1", "pods"))
            for place in "ab"
        ),
    ]
    async with serving(answer) as url, aiohttp.ClientSession(trace_configs=[watchers.trace()]) as session:

        async def ask(path: str, query: str) -> None:
            async with session.get(f"{url}/{path}{query}"):
                pass

        watchers.failed(LOGIN, "no plugin")
        for path in paths * 2:
            await ask(path, "")
        assert watchers.unlisted() == "waiting for the watch of bamboojobs"
        refusing = False
        for path in paths:
            await ask(path, "")
            assert watchers.unlisted() is not None
        for path in paths:
            assert watchers.unlisted() is not None
            await ask(path, "?watch=true")
        assert watchers.unlisted() is None
        refusing = True
        await ask(paths[0], "?watch=true")
        assert watchers.unlisted() is None, "it has listed what there was"
        for task in tasks:
            task.cancel()
    begun = "the API server does not answer a watch, and is asked again: "
    told = [record.message for record in caplog.records if record.name.startswith("bamboo_operator")]
    expected = [f"{begun}{LOGIN}: no plugin", "the API server answers all watches again"]
    assert told == [*expected, f"{begun}/api/v1/nodes: 403 Forbidden"], "once at the beginning and at the end"


async def test_a_server_that_is_not_there_does_not_answer(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiohttp.ClientSession(trace_configs=[WatchHealth().trace()]) as session:
        for _ in range(2):
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"http://127.0.0.1:{unused_tcp_port}/api/v1/nodes")
    (told,) = [record.message for record in caplog.records]
    assert "is asked again: /api/v1/nodes: Cannot connect" in told


def test_what_kopf_says_of_each_try_is_not_logged() -> None:
    for name, message, kept in (
        ("kopf._cogs.clients.api", "Request attempt #3/721 failed; will retry: GET /api/v1/nodes -> 503", False),
        ("kopf.activities.authentication", "Activity 'login' failed temporarily: no plugin", False),
        ("kopf._core.reactor", "Activity 'login' failed", True),
        ("bamboo_operator", "Request attempt #3/721 failed", True),
    ):
        assert KopfRepetitions().filter(logging.makeLogRecord({"name": name, "msg": message})) is kept
