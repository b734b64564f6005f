"""The end of a job's workers: they may exit, and their pods are deleted, however often the API server refuses it."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from bamboo_core.kube.api import KubeApi, Object
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.attempts import ApiAttempts
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.signals.signals import grace_period, lives, worker_exit

EXIT_SECONDS = 15.0  # for workers to end by themselves when the job is over


def exit_seconds(pod: Mapping[str, Any], *, logging: bool) -> float:
    """The seconds in which a worker that was told to stop should exit. logging: its loggers take what is left of the
    history, for which it has less than its pod's grace period; a pod that is deleted meanwhile would have no more.
    """
    return EXIT_SECONDS + grace_period(pod) if logging else EXIT_SECONDS


def _runs(pod: Mapping[str, Any]) -> bool:
    return worker_exit(pod) is None and pod["status"].get("phase") == "Running"


class PodRemoval:
    """The removal of one job's workers. deleted: names of pods whose deletion was requested. They run until they have
    ended, and must not join again.
    """

    def __init__(self, job: JobIdentity, cluster: ClusterCache, api: KubeApi, attempts: ApiAttempts) -> None:
        self._job, self._cluster, self._api, self._attempts = job, cluster, api, attempts
        self.deleted: set[str] = set()

    def living(self) -> list[dict[str, Any]]:
        """Pods of workers that have not ended, and may stay."""
        return [pod for pod in self._cluster.pods(*self._job).values() if lives(pod)]

    def any_running(self) -> bool:
        """Does any worker run, be it on its way out?"""
        return any(map(_runs, self._cluster.pods(*self._job).values()))

    async def wait_for_exit(self, meanwhile: Callable[[], None], logging: Callable[[], Collection[str]]) -> None:
        """The workers were told to stop; most of those that run exit by themselves. meanwhile: called again and again,
        and at the end. logging: which of them wait for their loggers.
        """
        begun = time.monotonic()
        while any(
            time.monotonic() < begun + exit_seconds(pod, logging=pod["metadata"]["name"] in logging())
            for pod in filter(_runs, self.living())
        ):
            self._attempts.heartbeat()
            meanwhile()
            await asyncio.sleep(0.1)
        meanwhile()

    async def remove_running(self) -> None:
        """Delete the pods of workers that have not ended. Those of others stay, with their logs."""
        await self._remove(self.living())

    async def remove_all(self) -> None:
        await self._remove(list(self._cluster.pods(*self._job).values()))

    async def _remove(self, pods: Iterable[Object]) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            await self._attempts.until_done(f"delete pod {name}", partial(self._delete, pod))

    async def _delete(self, pod: Object) -> None:
        metadata = pod["metadata"]
        self.deleted.add(metadata["name"])
        if not await self._api.delete_pod(metadata["namespace"], metadata["name"], metadata["uid"]):
            self._cluster.forget_pod(pod)
