"""Answers Evictions of workers' pods: the shell of `evictions`."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from bamboo_core.kube.request_parts import Object
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.objects import utc_now
from bamboo_operator.signals.evictions import answer, target

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
UNATTENDED_SECONDS = 60.0  # after which a pod whose job nobody looks after holds nothing: not just after a start


class EvictionApi(Protocol):
    async def answer_eviction(self, eviction: Object, answer: Mapping[str, str]) -> bool: ...


class EvictionResponder:
    """What answers Evictions, one look at all of them after the other. ours: whether this operator, and no other one,
    looks after the jobs of a namespace. clock: the time of day.
    """

    def __init__(
        self,
        cluster: ClusterCache,
        api: EvictionApi,
        ours: Callable[[str], bool],
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster, self._api, self._ours, self._clock = cluster, api, ours, clock
        self._began = clock()
        self._failed = False  # the last write

    async def run(self) -> None:
        """Answers until it is cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(LOOK_SECONDS)

    async def turn(self) -> None:
        """Looks at all Evictions once, and writes what is due."""
        for eviction in self._cluster.evictions():
            if (due := self._due(eviction)) is None:
                continue
            try:
                there = await self._api.answer_eviction(eviction, due)
            except API_ERRORS as error:
                if not self._failed:
                    logger.warning("cannot answer the Eviction %s: %s", _name(eviction), described(error))
                self._failed = True
                return
            self._failed = False
            if not there:
                self._cluster.eviction_event("DELETED", eviction)

    def _due(self, eviction: Object) -> dict[str, str] | None:
        if not self._ours(eviction["metadata"]["namespace"]):
            return None
        wanted = target(eviction)
        found = self._cluster.pod_named(eviction["metadata"]["namespace"], wanted.get("name"))
        job, pod = found if found is not None else (None, None)
        if pod is not None and pod["metadata"].get("uid") != wanted.get("uid"):
            pod = None
        now = self._clock()
        trains = (now - self._began).total_seconds() < UNATTENDED_SECONDS
        trains = trains or (job is not None and self._cluster.listener_of(job) is not None)
        return answer(eviction, pod, now, trains=trains)


def _name(eviction: Object) -> str:
    return f"{eviction['metadata']['namespace']}/{eviction['metadata']['name']}"
