"""For workers that live although their job is over, suspended or deleted: who was to tell them had no time to, or did
not reach them. Without a word they would train on until their pods' grace period ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from bamboo.control.channel_events import ChannelEvent, WorkerJoined
from bamboo.control.protocol import Stop
from bamboo.control.server import Channels
from bamboo.planning.plan import WorkerId
from bamboo_operator.api import API_ERRORS
from bamboo_operator.cluster import Cluster, job_of, owner_uid
from bamboo_operator.doors import Doors, JobKey, Reviews, pod_check
from bamboo_operator.signals import is_deleted, seconds_over, worker_exit

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at which pods are left
FIRST_RETRY, LAST_RETRY = 0.5, 15.0
TOKEN_SECONDS = 60.0  # from the time when a pod should have gone until the API server no longer accepts its token
ThatJob = tuple[JobKey, str]  # with its uid: another job may have the name later
DELETED = Stop(reason="JobDeleted", message="the job was deleted")


@asynccontextmanager
async def farewell(job: ThatJob, cluster: Cluster, doors: Doors, reviews: Reviews, stop: Stop) -> AsyncIterator[None]:
    """Meanwhile the job's workers are let in, and told to stop."""
    strangers = partial(cluster.is_of_another, *job)
    channels = _channels(job, cluster, doors, reviews, stop, strangers)
    doors.open(job[0], channels)
    try:
        yield
    finally:
        await doors.close(job[0], channels)


def _channels(
    job: ThatJob, cluster: Cluster, doors: Doors, reviews: Reviews, stop: Stop, is_of_another: Callable[[str], bool]
) -> Channels:
    """Whoever comes in by them is told to stop. is_of_another: is the pod of that uid to go away for good?"""
    key, uid = job

    def uid_of(worker: WorkerId) -> str | None:
        pod = cluster.pods(key, uid).get(worker)
        return str(pod["metadata"]["uid"]) if pod else None

    def hear(event: ChannelEvent) -> None:
        if isinstance(event, WorkerJoined):
            channels.send(event.hello.worker, stop)

    channels = Channels(hear, doors.counted(pod_check(key, reviews, uid_of, is_of_another)))
    return channels


class Departures:
    """Jobs that were deleted, as long as pods of theirs are left: the garbage collector takes them away in its time.

    uid_of: a job -> its uid if there is one of that name, else None; raises what is in API_ERRORS.
    """

    def __init__(
        self, cluster: Cluster, doors: Doors, reviews: Reviews, uid_of: Callable[[JobKey], Awaitable[str | None]]
    ) -> None:
        self._cluster, self._doors, self._reviews, self._uid_of = cluster, doors, reviews, uid_of
        self._tasks: dict[ThatJob, asyncio.Task[None]] = {}

    def job_gone(self, key: JobKey, uid: str) -> None:
        """That job was deleted, or is being deleted."""
        self._begin((key, uid), self._attend((key, uid)), again=True)

    def pod_seen(self, pod: Mapping[str, Any], followed: bool) -> None:
        """followed: is its job looked after? If not, and the pod is to go, its job may have been deleted before us."""
        key, uid = job_of(pod), owner_uid(pod)
        if key is None or uid is None or followed or not is_deleted(pod):
            return
        self._begin((key, uid), self._ask((key, uid)), again=False)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: ThatJob, work: Any, *, again: bool) -> None:
        """again: also if there is such work already, in whose place it comes."""
        if before := self._tasks.get(job):
            if not again:
                work.close()
                return
            before.cancel()
        task = self._tasks[job] = asyncio.create_task(work, name=f"farewell to {job[0][0]}/{job[0][1]}")
        task.add_done_callback(lambda done: self._ended(job, done))

    def _ended(self, job: ThatJob, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(job) is task:
            del self._tasks[job]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s/%s: cannot stop the workers of the deleted job: %r", *job[0], error, exc_info=error)

    def _left(self, job: ThatJob) -> bool:
        """NB: a node that hangs never says that its pods have ended; their tokens end soon after their time."""
        return any(
            worker_exit(pod) is None and seconds_over(pod, datetime.now(UTC)) < TOKEN_SECONDS
            for pod in self._cluster.pods(*job).values()
        )

    async def _ask(self, job: ThatJob) -> None:
        """NB: when an operator begins, it hears of pods before it hears of their jobs."""
        pause = FIRST_RETRY
        while self._left(job):
            try:
                there = await self._uid_of(job[0])
            except API_ERRORS as error:
                logger.warning("%s/%s: cannot ask for the job: %s", *job[0], error or type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)
            else:
                if there != job[1]:
                    await self._attend(job)
                return

    async def _attend(self, job: ThatJob) -> None:
        if not self._left(job):
            return
        # NB: the job that has the name by now may not have opened its door yet; its workers must come again
        channels = _channels(job, self._cluster, self._doors, self._reviews, DELETED, lambda pod: False)
        try:
            while self._left(job):
                self._doors.offer(job[0], channels)  # NB: another job of that name refuses those workers by itself
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._doors.close(job[0], channels)
