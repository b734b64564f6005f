"""The end of a job's workers: they are let go, and their pods are deleted, however often the API server refuses it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from bamboo.job.spec import CleanPodPolicy
from bamboo_operator.api import API_ERRORS, Api, ApiError
from bamboo_operator.cluster import Cluster
from bamboo_operator.doors import JobKey
from bamboo_operator.signals import lives

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 15.0  # for workers to end by themselves when the job is over
FIRST_RETRY, LAST_RETRY = 0.5, 15.0


class Removal:
    """dismissed: names of pods whose deletion was asked for; they live until they have gone, and must not come in.

    beat: called while something is waited for, as a sign of life.
    """

    def __init__(self, key: JobKey, uid: str, cluster: Cluster, api: Api, beat: Callable[[], None]) -> None:
        self._key, self._uid, self._cluster, self._api, self.beat = key, uid, cluster, api, beat
        self.dismissed: set[str] = set()

    def living(self) -> list[dict[str, Any]]:
        """Pods of workers that have not ended, and may stay."""
        return [pod for pod in self._cluster.pods(self._key, self._uid).values() if lives(pod)]

    async def let_leave(self) -> None:
        """The workers were told to stop; most end by themselves."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and self.living():
            self.beat()
            await asyncio.sleep(0.1)

    async def remove(self, policy: CleanPodPolicy) -> None:
        if policy is CleanPodPolicy.NONE:
            return
        pods = list(self._cluster.pods(self._key, self._uid).values())
        for pod in pods if policy is CleanPodPolicy.ALL else self.living():
            await self.persist(f"delete pod {pod['metadata']['name']}", partial(self._delete, pod["metadata"]))

    async def _delete(self, metadata: Mapping[str, Any]) -> None:
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.dismissed.add(name)
        if not await self._api.delete_pod(namespace, name, uid):
            self._cluster.pod_missed((namespace, name), uid)

    async def persist(self, what: str, act: Callable[[], Awaitable[None]]) -> None:
        """Until it is done, or there is nothing any more that it could be done to."""
        pause = FIRST_RETRY
        while True:
            self.beat()
            try:
                await act()
            except ApiError as error:
                if error.status in (404, 409):
                    return
                self.complain(what, error)
            except API_ERRORS as error:
                self.complain(what, error)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY)

    def complain(self, what: str, error: BaseException) -> None:
        logger.warning("%s/%s: cannot %s: %s", *self._key, what, error or type(error).__name__)
