"""pytest plugin for pod_controller_kit: a job's pod controller, and its coordinator, which runs until the test ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_operator.jobs import coordinator_runner as runner_module
from bamboo_operator.jobs.coordinator_runner import TrainingRun
from bamboo_operator.kube.objects import JobIdentity, utc_now
from bamboo_operator.manifests.worker_pod import WorkerPodSettings
from bamboo_operator.pods import controller as controller_module
from bamboo_operator.pods import disruption_budget as budget_module
from bamboo_operator.pods import view as pods_module
from bamboo_operator.signals.node_marks import NodeMark
from operator_kit import JOB_UID, SETTINGS, job
from pod_controller_kit import BEGINNING, Job, Place


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Job]]:
    tasks: list[asyncio.Task[None]] = []

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
        parsed = job(**spec)
        running = TrainingRun(
            job=JobIdentity((parsed.namespace, parsed.name), JOB_UID),
            spec=parsed,
            manifest={},
            resumed=resumed,
            known_lost=known_lost,
            counted=counted,
        )
        made = Job(place, running, marks, settings)
        for module in (runner_module, budget_module, controller_module, pods_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
        monkeypatch.setattr(controller_module, "utc_now", lambda: utc_now() + timedelta(seconds=made.now - BEGINNING))
        tasks.append(asyncio.create_task(made.runner.run()))
        return made

    yield make
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
