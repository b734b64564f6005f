"""Removal of a job's workers: the wait until they exit, and the deletion of their pods, with retries."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from bamboo_core.kube.api import Object
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.pods.view import JobPods
from bamboo_operator.signals.signals import grace_period, worker_exit

EXIT_SECONDS = 15.0  # for workers to end by themselves when the job is over


def exit_seconds(pod: Mapping[str, Any], *, logging: bool) -> float:
    """Return the seconds that a worker has to exit after it was asked to stop.

    logging: the worker's loggers still write the rest of the training history, so it gets the pod's grace period in
    addition. Deleting its pod now would leave it only that period.
    """
    return EXIT_SECONDS + grace_period(pod) if logging else EXIT_SECONDS


def _runs(pod: Mapping[str, Any]) -> bool:
    return worker_exit(pod) is None and pod["status"].get("phase") == "Running"


class PodRemoval:
    """The removal of one job's worker pods, so that the workers end and do not join again."""

    def __init__(self, pods: JobPods, attempts: ApiAttempts) -> None:
        self._pods, self._attempts = pods, attempts

    def any_running(self) -> bool:
        """Return whether any worker runs, including workers that are exiting."""
        return any(map(_runs, self._pods.all().values()))

    async def wait_for_exit(self, meanwhile: Callable[[], None], logging: Callable[[], Collection[str]]) -> None:
        """Wait until running workers exit after they were asked to stop, at most `exit_seconds` for each. Do not
        wait for workers whose pods are already being deleted.

        meanwhile: called repeatedly, and once at the end. logging: returns the workers that wait for their loggers.
        """
        begun = time.monotonic()
        while any(
            time.monotonic() < begun + exit_seconds(pod, logging=name in logging())
            for name, pod in self._pods.living().items()
            if _runs(pod)
        ):
            self._attempts.heartbeat()
            meanwhile()
            await asyncio.sleep(0.1)
        meanwhile()

    async def remove_running(self) -> None:
        """Delete the pods of workers that have not ended. Pods that have ended stay, with their logs."""
        await self._remove(self._pods.living().values())

    async def remove_all(self) -> None:
        await self._remove(self._pods.all().values())

    async def _remove(self, pods: Iterable[Object]) -> None:
        for pod in list(pods):
            await self._attempts.until_done(f"delete pod {pod['metadata']['name']}", partial(self._pods.delete, pod))
