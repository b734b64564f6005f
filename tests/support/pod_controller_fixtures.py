"""pytest plugin for pod_controller_kit: a job's pod controller, and its coordinator, which runs until the test ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_operator.jobs import coordinator_runner as runner_module
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.pods import controller as controller_module
from bamboo_operator.pods import disruption_budget as budget_module
from bamboo_operator.pods import view as pods_module
from bamboo_operator.signals.node_marks import NodeMark
from operator_kit import SETTINGS, job
from pod_controller_kit import BEGINNING, Job, Place


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Job]]:
    running: list[asyncio.Task[None]] = []

    def make(
        place: Place,
        resumed: bool = False,
        known_lost: frozenset[str] = frozenset(),
        counted: frozenset[str] = frozenset(),
        marks: tuple[NodeMark, ...] = (),
        settings: WorkerPodSettings = SETTINGS,
        **spec: Any,
    ) -> Job:
        monkeypatch.setattr(runner_module, "AwakeClock", lambda: lambda: time.monotonic() + place.passed)
        made = Job(place, job(**spec), resumed, known_lost, counted, marks, settings)
        for module in (runner_module, budget_module, controller_module, pods_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
        monkeypatch.setattr(controller_module, "utc_now", lambda: utc_now() + timedelta(seconds=made.now - BEGINNING))
        running.append(asyncio.create_task(made.runner.run()))
        return made

    yield make
    for task in running:
        task.cancel()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
