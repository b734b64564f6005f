"""Who waits for a turn keeps its place."""

import asyncio

import pytest

from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.jobs.reconciler import JobReconciler
from bamboo_operator.jobs.training import turn
from slow_api_kit import manifest, shared_for, virtual_runner


def test_who_waits_for_its_turn_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: else those that were served already would come before it, again and again."""
    served = []

    async def take_turns(job: JobReconciler, turns: asyncio.Semaphore) -> None:
        for _ in range(3):
            async with turn(turns, job._attempts.heartbeat):
                served.append(job.key[1])
                await asyncio.sleep(20.0)

    async def all_take_turns(names: list[str]) -> None:
        turns = asyncio.Semaphore(1)
        shared = shared_for(ClusterCache(), None)  # type: ignore[arg-type]
        jobs = [
            JobReconciler({**manifest(name), "metadata": {"namespace": "x", "name": name, "uid": name}}, shared)
            for name in names
        ]
        await asyncio.gather(*(take_turns(job, turns) for job in jobs))

    names = [f"job-{number}" for number in range(6)]
    with virtual_runner(monkeypatch) as (runner, _):
        runner.run(all_take_turns(names))
    assert served == 3 * names
