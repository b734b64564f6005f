"""The end of a job's workers: they may exit, and their pods are deleted, however often the API server refuses it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from bamboo.job.placement_spec import CleanPodPolicy
from bamboo.kube.errors import ApiError
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.cluster.signals import lives
from bamboo_operator.kube.client import API_ERRORS, ApiClient, described
from bamboo_operator.kube.objects import JobKey

logger = logging.getLogger(__name__)

EXIT_SECONDS = 15.0  # for workers to end by themselves when the job is over
FIRST_RETRY, LAST_RETRY = 0.5, 15.0


class PodRemoval:
    """deleted: names of pods whose deletion was requested; they run on until they have ended, and must not join again.

    heartbeat: called while something is waited for, so that the job does not count as stuck.
    """

    def __init__(
        self, key: JobKey, uid: str, cluster: ClusterCache, api: ApiClient, heartbeat: Callable[[], None]
    ) -> None:
        self._key, self._uid, self._cluster, self._api, self._heartbeat = key, uid, cluster, api, heartbeat
        self.deleted: set[str] = set()

    def living(self) -> list[dict[str, Any]]:
        """Pods of workers that have not ended, and may stay."""
        return [pod for pod in self._cluster.pods(self._key, self._uid).values() if lives(pod)]

    async def wait_for_exit(self) -> None:
        """The workers were told to stop; most exit by themselves."""
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline and self.living():
            self._heartbeat()
            await asyncio.sleep(0.1)

    async def remove(self, policy: CleanPodPolicy) -> None:
        if policy is CleanPodPolicy.NONE:
            return
        pods = list(self._cluster.pods(self._key, self._uid).values())
        for pod in pods if policy is CleanPodPolicy.ALL else self.living():
            await self.retry(f"delete pod {pod['metadata']['name']}", partial(self._delete, pod["metadata"]))

    async def _delete(self, metadata: Mapping[str, Any]) -> None:
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.deleted.add(name)
        if not await self._api.delete_pod(namespace, name, uid):
            self._cluster.forget_pod((namespace, name), uid)

    async def retry(self, what: str, act: Callable[[], Awaitable[None]]) -> None:
        """Until it is done, or the object is gone."""
        pause = FIRST_RETRY
        while True:
            self._heartbeat()
            try:
                await act()
            except ApiError as error:
                if error.status in (404, 409):
                    return
                self.log_failure(what, error)
            except API_ERRORS as error:
                self.log_failure(what, error)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY)

    def log_failure(self, what: str, error: BaseException) -> None:
        logger.warning("%s/%s: cannot %s: %s", *self._key, what, described(error))
