"""Channels that stop workers which connect after their job has ended, was suspended or was deleted.

Such workers missed the order to stop because the operator had ended or their connection was broken. Unless stopped,
they would train on until their pods' grace period ends.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from bamboo_core.control.protocol import ChannelEvent, Stop, WorkerJoined
from bamboo_core.control.server import Authenticate, Channels, Unauthorized, Unavailable
from bamboo_core.kube.api import jobs_path
from bamboo_core.kube.errors import RemoteError
from bamboo_core.planning.plan import WorkerId
from bamboo_operator.auth.pod_tokens import PodIdentity, bearer_token, claimed_identity, pod_authenticator
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.attempts import described
from bamboo_operator.kube.objects import JobIdentity, JobKey

DELETED = Stop(reason="JobDeleted", message="the job was deleted")


@asynccontextmanager
async def stopping_late_workers(job: JobIdentity, shared: SharedResources, stop: Stop) -> AsyncIterator[None]:
    """Stop workers of the job that connect while the context is open."""

    def uid_of(worker: WorkerId) -> str | None:
        pod = shared.cluster.pods(*job).get(worker)
        return str(pod["metadata"]["uid"]) if pod else None

    of_another_job = partial(shared.cluster.belongs_to_another_job, *job)
    channels = _channels(shared, stop, pod_authenticator(job.key, shared.reviews, uid_of, of_another_job))
    shared.gateway.open(job.key, channels)
    try:
        yield
    finally:
        await shared.gateway.close(job.key, channels)


def _channels(shared: SharedResources, stop: Stop, check: Authenticate) -> Channels:
    """Return channels that tell each connecting worker to stop."""

    def handle(event: ChannelEvent) -> None:
        if isinstance(event, WorkerJoined):
            channels.send(event.hello.worker, stop)

    channels = Channels(handle, shared.gateway.counting_refusals(check))
    return channels


class DeletedJobs:
    """The channels that stop workers of deleted jobs when they connect. manages: returns whether this operator manages
    a job.
    """

    def __init__(self, shared: SharedResources, manages: Callable[[JobIdentity], bool]) -> None:
        self._shared, self._manages = shared, manages
        self._channels = _channels(shared, DELETED, self._check)

    async def stop(self) -> None:
        """Disconnect the workers of deleted jobs."""
        await self._channels.close()

    def channels_for(self, job: JobKey, request: web.Request) -> Channels | None:
        """Return the channels for a caller whose job has no open path; None unless the job may have been deleted.

        An operator that starts knows pods before their jobs, so the check of the caller asks the API server.
        """
        try:
            owner = self._shared.cluster.owner_of(job, _claimed(request).uid)
        except Unauthorized:
            return None
        return None if not owner or self._manages(JobIdentity(job, owner)) else self._channels

    async def _check(self, request: web.Request) -> WorkerId | None:
        """Return the worker of a deleted job that calls with its own pod's token. Raises Unauthorized, or Unavailable
        if the job exists or the API server does not answer.
        """
        claim, key = _claimed(request), (request.match_info["namespace"], request.match_info["name"])
        owner = self._shared.cluster.owner_of(key, claim.uid)
        worker = await pod_authenticator(key, self._shared.reviews, {claim.pod: claim.uid}.get)(request)
        try:
            jobs = await self._shared.api.listed(jobs_path(key[0]), {"fieldSelector": f"metadata.name={key[1]}"})
        except RemoteError as error:
            raise Unavailable(described(error)) from error
        if any(job["metadata"]["uid"] == owner and "deletionTimestamp" not in job["metadata"] for job in jobs):
            raise Unavailable(f"the job of {claim.pod} has not begun here")
        return worker


def _claimed(request: web.Request) -> PodIdentity:
    return claimed_identity(bearer_token(request))
