"""pytest plugin: a job's coordinator and hands, whose loop runs until the test ends; goes with hands_kit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_operator import brain as brain_module
from bamboo_operator import budget as budget_module
from bamboo_operator import hands as hands_module
from bamboo_operator.node_marks import NodeMark
from hands_kit import Job, Place
from operator_kit import job


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Job]]:
    thinking: list[asyncio.Task[None]] = []

    def make(
        place: Place, resumed: bool = False, judged: frozenset[str] = frozenset(), marks: tuple[NodeMark, ...] = (),
        **spec: Any,
    ) -> Job:  # fmt: skip
        made = Job(place, job(**spec), resumed, judged, marks)
        for module in (brain_module, budget_module, hands_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
        thinking.append(asyncio.create_task(made.brain.run()))
        return made

    yield make
    for task in thinking:
        task.cancel()
    for ended in await asyncio.gather(*thinking, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
