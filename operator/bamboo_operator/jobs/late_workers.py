"""Workers that connect although their job is over, suspended or deleted: they are told to stop.

They were not told so before, for the operator or the connection had ended. Otherwise they would train on until their
pods' grace period ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bamboo_core.control.channel_events import ChannelEvent, WorkerJoined
from bamboo_core.control.protocol import Stop
from bamboo_core.control.server import Channels
from bamboo_core.kube.errors import RemoteError
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.auth.pod_tokens import TokenReviewer, pod_authenticator
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.cluster.indices import ClusterIndices
from bamboo_operator.kube.attempts import FIRST_RETRY, LAST_RETRY
from bamboo_operator.kube.objects import JobIdentity, JobKey, job_of, owner_uid, utc_now
from bamboo_operator.kube.refusals import described
from bamboo_operator.signals.signals import seconds_over, worker_exit

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # of which pods are left
TOKEN_SECONDS = 60.0  # from the time when a pod should have gone until the API server no longer accepts its token
DELETED = Stop(reason="JobDeleted", message="the job was deleted")


@asynccontextmanager
async def stopping_late_workers(
    job: JobIdentity, cluster: ClusterIndices, gateway: WorkerGateway, reviews: TokenReviewer, stop: Stop
) -> AsyncIterator[None]:
    """Meanwhile the job's workers may connect, and are told to stop."""
    of_another_job = partial(cluster.belongs_to_another_job, *job)
    channels = _channels(job, cluster, gateway, reviews, stop, of_another_job)
    gateway.open(job.key, channels)
    try:
        yield
    finally:
        await gateway.close(job.key, channels)


def _channels(
    job: JobIdentity,
    cluster: ClusterIndices,
    gateway: WorkerGateway,
    reviews: TokenReviewer,
    stop: Stop,
    of_another_job: Callable[[str], bool],
) -> Channels:
    """Whoever connects to them is told to stop. of_another_job: does the pod of that uid belong to another job?"""
    key, uid = job

    def uid_of(worker: WorkerId) -> str | None:
        pod = cluster.pods(key, uid).get(worker)
        return str(pod["metadata"]["uid"]) if pod else None

    def handle(event: ChannelEvent) -> None:
        if isinstance(event, WorkerJoined):
            channels.send(event.hello.worker, stop)

    check = pod_authenticator(key, reviews, uid_of, of_another_job)
    channels = Channels(handle, gateway.counting_refusals(check))
    return channels


class DeletedJobs:
    """Jobs that were deleted, as long as pods of theirs are left: the garbage collector takes them away in its time.

    uid_of: a job -> its uid if there is one of that name, else None; raises RemoteError.
    """

    def __init__(
        self,
        cluster: ClusterIndices,
        gateway: WorkerGateway,
        reviews: TokenReviewer,
        uid_of: Callable[[JobKey], Awaitable[str | None]],
    ) -> None:
        self._cluster, self._gateway, self._reviews, self._uid_of = cluster, gateway, reviews, uid_of
        self._tasks: dict[JobIdentity, asyncio.Task[None]] = {}
        self._served: set[JobIdentity] = set()  # whose workers are told to stop

    def job_deleted(self, key: JobKey, uid: str) -> None:
        """That job was deleted, or is being deleted. It may be told again: whoever is connecting stays connected."""
        job = JobIdentity(key, uid)
        if job not in self._served:
            self._served.add(job)
            self._begin(job, self._serve(job), again=True)

    def pod_changed(self, pod: Mapping[str, Any], followed: bool) -> None:
        """followed: is its job managed here? If not, the job of a pod that is deleted or orphaned may be gone."""
        key, uid = job_of(pod), owner_uid(pod)
        if key and uid and not followed:
            job = JobIdentity(key, uid)
            self._begin(job, self._check(job), again=False)

    async def stop(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: JobIdentity, work: Any, *, again: bool) -> None:
        """again: also if there is such work already, in whose place it comes."""
        if before := self._tasks.get(job):
            if not again:
                work.close()
                return
            before.cancel()
        task = self._tasks[job] = asyncio.create_task(work, name=f"late workers of {job.key[0]}/{job.key[1]}")
        task.add_done_callback(lambda done: self._ended(job, done))

    def _ended(self, job: JobIdentity, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(job) is task:
            del self._tasks[job]
            self._served.discard(job)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s/%s: cannot stop the workers of the deleted job: %r", *job.key, error, exc_info=error)

    def _left(self, job: JobIdentity) -> bool:
        """A node that hangs never reports that its pods have ended; their tokens expire soon after their time."""
        return any(
            worker_exit(pod) is None and seconds_over(pod, utc_now()) < TOKEN_SECONDS
            for pod in self._cluster.pods(*job).values()
        )

    async def _check(self, job: JobIdentity) -> None:
        """When an operator begins, pods are listed before their jobs are."""
        pause = FIRST_RETRY
        while self._left(job):
            try:
                there = await self._uid_of(job.key)
            except RemoteError as error:
                logger.warning("%s/%s: cannot ask for the job: %s", *job.key, described(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)
            else:
                if there != job.uid:
                    await self._serve(job)
                return

    async def _serve(self, job: JobIdentity) -> None:
        if not self._left(job):
            return
        # a job that has the name by now may not have opened its path yet; its workers must come again
        channels = _channels(job, self._cluster, self._gateway, self._reviews, DELETED, lambda pod: False)
        try:
            while self._left(job):
                self._gateway.open_unless_open(job.key, channels)  # another job of that name refuses them by itself
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._gateway.close(job.key, channels)
