"""Workers that connect after their job has ended or was suspended or deleted: the operator stops them.

They missed the order to stop because the operator had ended or their connection was broken. Without it they would
train on until their pods' grace period ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bamboo_core.control.protocol import ChannelEvent, Stop, WorkerJoined
from bamboo_core.control.server import Channels
from bamboo_core.kube.api import job_path
from bamboo_core.kube.errors import RemoteError
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.auth.pod_tokens import pod_authenticator
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.attempts import FIRST_RETRY, LAST_RETRY, described
from bamboo_operator.kube.objects import JobIdentity, JobKey, job_of, owner_uid, utc_now
from bamboo_operator.signals.signals import seconds_over, worker_exit

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between checks for remaining pods
TOKEN_SECONDS = 60.0  # from the end of a pod's grace period until the API server rejects its token
DELETED = Stop(reason="JobDeleted", message="the job was deleted")


@asynccontextmanager
async def stopping_late_workers(job: JobIdentity, shared: SharedResources, stop: Stop) -> AsyncIterator[None]:
    """Stop workers of the job that connect while the context is open."""
    channels = _channels(job, shared, stop, partial(shared.cluster.belongs_to_another_job, *job))
    shared.gateway.open(job.key, channels)
    try:
        yield
    finally:
        await shared.gateway.close(job.key, channels)


def _channels(
    job: JobIdentity, shared: SharedResources, stop: Stop, is_of_another_job: Callable[[str], bool]
) -> Channels:
    """Return channels that stop each connecting worker. is_of_another_job: see `pod_authenticator`."""

    def uid_of(worker: WorkerId) -> str | None:
        pod = shared.cluster.pods(*job).get(worker)
        return str(pod["metadata"]["uid"]) if pod else None

    def handle(event: ChannelEvent) -> None:
        if isinstance(event, WorkerJoined):
            channels.send(event.hello.worker, stop)

    check = pod_authenticator(job.key, shared.reviews, uid_of, is_of_another_job)
    channels = Channels(handle, shared.gateway.counting_refusals(check))
    return channels


class DeletedJobs:
    """Deleted jobs with remaining pods, which the garbage collector removes in its time."""

    def __init__(self, shared: SharedResources) -> None:
        self._shared = shared
        self._tasks: dict[JobIdentity, asyncio.Task[None]] = {}
        self._served: set[JobIdentity] = set()  # jobs whose workers are being stopped

    def job_deleted(self, key: JobKey, uid: str) -> None:
        """Stop the workers of a deleted job. Repeated calls keep connecting workers connected."""
        job = JobIdentity(key, uid)
        if job not in self._served:
            self._served.add(job)
            self._begin(job, self._serve(job), again=True)

    def pod_changed(self, pod: Mapping[str, Any], followed: bool) -> None:
        """Check the job of a deleted or orphaned pod, which may be gone. followed: this operator manages the job."""
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
        """Start a task for the job. again: also replace an existing one."""
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
        """Return whether workers of the job may still connect.

        A node that hangs never reports the end of its pods, but their tokens expire soon after their grace period.
        """
        return any(
            worker_exit(pod) is None and seconds_over(pod, utc_now()) < TOKEN_SECONDS
            for pod in self._shared.cluster.pods(*job).values()
        )

    async def _check(self, job: JobIdentity) -> None:
        """Stop the job's workers if it is gone. An operator that starts lists pods before their jobs."""
        pause = FIRST_RETRY
        while self._left(job):
            try:
                uid = await self._shared.api.uid_of(job_path(*job.key))
            except RemoteError as error:
                logger.warning("%s/%s: cannot ask for the job: %s", *job.key, described(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)
            else:
                if uid != job.uid:
                    await self._serve(job)
                return

    async def _serve(self, job: JobIdentity) -> None:
        if not self._left(job):
            return
        # a newer job of this name may not have opened its path yet; its workers must reconnect
        channels = _channels(job, self._shared, DELETED, lambda pod: False)
        try:
            while self._left(job):
                self._shared.gateway.open_unless_open(job.key, channels)  # a newer job of that name refuses them itself
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._shared.gateway.close(job.key, channels)
