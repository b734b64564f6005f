"""Watches that end are missed."""

import asyncio

from bamboo_operator.cluster.watch_health import WatchHealth


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
