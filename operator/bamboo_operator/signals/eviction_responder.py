"""Answers Evictions of workers' pods: the shell of `evictions`."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from bamboo_core.kube.errors import ApiError
from bamboo_core.kube.request_parts import Object
from bamboo_operator.cluster.cache import ClusterCache
from bamboo_operator.kube.client import API_ERRORS, described
from bamboo_operator.kube.objects import JobKey, utc_now
from bamboo_operator.signals.evictions import answer, target

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
UNATTENDED_SECONDS = 60.0  # after which a pod whose job nobody looks after holds nothing: somebody may be about to


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
        self._unattended: dict[str, datetime] = {}  # since when nobody looks after the job, by its Eviction's uid
        self._failed = False  # a write of the last look

    async def run(self) -> None:
        """Answers until it is cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(LOOK_SECONDS)

    async def turn(self) -> None:
        """Looks at all Evictions once, and writes what is due."""
        ours = [one for one in self._cluster.evictions() if self._ours(one["metadata"]["namespace"])]
        left = {one["metadata"]["uid"] for one in ours}
        self._unattended = {uid: since for uid, since in self._unattended.items() if uid in left}
        failed = False
        for eviction in ours:
            if (due := self._due(eviction)) is None:
                continue
            try:
                there = await self._api.answer_eviction(eviction, due)
            except API_ERRORS as error:
                if not self._failed and not failed:
                    logger.warning("cannot answer the Eviction %s: %s", _name(eviction), described(error))
                failed = True
                if isinstance(error, ApiError):
                    continue  # another one may be answered
                break
            if not there:
                self._cluster.eviction_event("DELETED", eviction)
        self._failed = failed

    def _due(self, eviction: Object) -> dict[str, str] | None:
        wanted = target(eviction)
        found = self._cluster.pod_named(eviction["metadata"]["namespace"], wanted.get("name"))
        job, pod = found if found is not None else (None, None)
        if pod is not None and pod["metadata"].get("uid") != wanted.get("uid"):
            pod = None
        now = self._clock()
        return answer(eviction, pod, now, trains=self._trains(eviction["metadata"]["uid"], job, now))

    def _trains(self, uid: str, job: JobKey | None, now: datetime) -> bool:
        """Does somebody look after the job of that Eviction's pod, or may be about to?"""
        if job is not None and self._cluster.listener_of(job) is not None:
            self._unattended.pop(uid, None)
            return True
        return (now - self._unattended.setdefault(uid, now)).total_seconds() < UNATTENDED_SECONDS


def _name(eviction: Object) -> str:
    return f"{eviction['metadata']['namespace']}/{eviction['metadata']['name']}"
