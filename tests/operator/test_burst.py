"""Who waits for a turn keeps its place."""

import asyncio

import pytest

from bamboo_operator.jobs.reconciler import turn
from bamboo_operator.kube.attempts import ApiAttempts
from slow_api_kit import virtual_runner


def test_who_waits_for_its_turn_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: else those that were served already would come before it, again and again."""
    served = []

    async def take_turns(name: str, turns: asyncio.Semaphore) -> None:
        for _ in range(3):
            async with turn(turns, ApiAttempts(("x", name)).heartbeat):
                served.append(name)
                await asyncio.sleep(20.0)

    async def all_take_turns(names: list[str]) -> None:
        turns = asyncio.Semaphore(1)
        await asyncio.gather(*(take_turns(name, turns) for name in names))

    names = [f"job-{number}" for number in range(6)]
    with virtual_runner(monkeypatch) as (runner, _):
        runner.run(all_take_turns(names))
    assert served == 3 * names
