"""A job on a cluster, as `JobHandle` uses it in the background loop."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from bamboo.jobs.errors import InvalidRequest, JobError, JobFailed, JobUnrecoverable
from bamboo.jobs.results import JobProgress, Occurrence, progress_of
from bamboo.remote import operations
from bamboo.remote.job_reader import JobReader
from bamboo.remote.session import patiently
from bamboo.remote.victims import VictimChoice, victim
from bamboo.remote.watch import INTERVAL_SECONDS
from bamboo.terminal.snapshot import JobSnapshot, UnseenEvents
from bamboo_core.kube.api import KubeApi
from bamboo_core.names import EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.view.job_view import JobView

GONE_SECONDS: Final = 600.0  # for workers to end, after a checkpoint


class ClusterJob:
    """A job on a cluster, identified by its uid. Its coroutines run in the background loop.

    They raise RemoteError, such as for errors of the API server or the connection; `handle.call` converts it.
    """

    def __init__(self, api: KubeApi, job: JobView) -> None:
        self._api, self._job = api, job
        self._reader = JobReader(api, job.namespace, job.name, job.uid)

    @property
    def name(self) -> str:
        return self._job.name

    async def progress(self) -> JobProgress:
        return progress_of(await self._now())

    def feed(self) -> Callable[[], Coroutine[Any, Any, list[Occurrence]]]:
        """Return a function whose first call returns all events of the job and its pods, and later calls the new ones.

        A cluster usually keeps events for an hour. A repeated event is returned again.
        """
        unseen = UnseenEvents()

        async def new() -> list[Occurrence]:
            snapshot = await self.snapshot(pod_events=True)
            return [
                Occurrence(time=one.at.timestamp(), reason=one.reason, message=one.message, warning=one.warning)
                for one in unseen.of(snapshot.events)
            ]

        return new

    async def over(self) -> bool:
        return (await self._now()).status.ended is not None

    async def moment(self) -> None:
        await asyncio.sleep(INTERVAL_SECONDS)

    async def snapshot(self, *, pod_events: bool = False) -> JobSnapshot:
        """Return the job with its workers and events. pod_events: also the events of its pods. Raises JobDeleted."""
        return await patiently(lambda: self._reader.snapshot(pod_events=pod_events))

    async def wait(self, seconds: float | None) -> JobProgress:
        """Wait until the job has ended, also through suspensions, and return its progress. seconds: None for no limit.

        Raises JobFailed or JobUnrecoverable if the job ended without being complete, WaitTimedOut, JobDeleted.
        """
        job = await self._until(lambda job: job.status.ended is not None, "is not over", seconds)
        end = job.status.ended
        assert end is not None
        if job.exit_code == EXIT_OK:
            return progress_of(job)
        kind: type[JobError] = JobUnrecoverable if job.exit_code == EXIT_UNRECOVERABLE else JobFailed
        raise kind(job.name, end.reason, end.message)

    async def interrupted(self) -> None:
        """Do nothing after Ctrl-C during a wait: the job on the cluster goes on."""

    async def preempt(self, worker: str | None, *, notice: bool) -> None:
        """Delete a worker's pod. worker: None for a random one that trains. notice: give the pod its grace period."""
        choice = VictimChoice(worker=worker, random=worker is None)
        snapshot = await self.snapshot()
        chosen = victim(snapshot.job, snapshot.workers, choice, random.SystemRandom().choice)
        await operations.take_away(self._api, snapshot.job, chosen, notice=notice)

    async def scale(self, workers: int) -> None:
        """Set spec.elastic.maxWorkers. Raises InvalidRequest if the job's grid is fixed."""
        if self._job.spec.elastic is None:
            raise InvalidRequest(f"{self._job.name} cannot be scaled: without spec.elastic its grid is fixed")
        await operations.change_spec(self._api, self._job, {"elastic": {"maxWorkers": workers}})

    async def suspend(self) -> None:
        """Suspend the job and wait until its workers are gone. Raises WaitTimedOut; InvalidRequest if it is over."""
        self._check_not_over(await self._now(), "suspended")
        await operations.change_spec(self._api, self._job, {"suspend": True})
        job = await self._until(
            lambda job: job.status.holds("Suspended") or job.status.ended is not None, "was not suspended", GONE_SECONDS
        )
        self._check_not_over(job, "suspended")
        await operations.until_no_pods(self._api, job, GONE_SECONDS)

    async def resume(self) -> None:
        """Resume the job. Raises InvalidRequest if it is over, or the operator keeps it suspended."""
        job = await self._now()
        self._check_not_over(job, "resumed")
        if job.held_back:
            raise InvalidRequest(f"{job.name} cannot be resumed: {job.held_back}")
        await operations.change_spec(self._api, self._job, {"suspend": False})

    async def stop(self) -> None:
        """Delete the job and wait until its workers are gone. Raises WaitTimedOut."""
        await self._api.delete_job(self._job.namespace, self._job.name, self._job.uid)
        await operations.until_no_pods(self._api, self._job, GONE_SECONDS)

    def history_place(self) -> str:
        return operations.history_place(self._job)

    def checkpoint_place(self) -> str:
        checkpoint = self._job.spec.checkpoint
        if checkpoint is None or checkpoint.url is None:
            raise InvalidRequest(f"{self.name} keeps no checkpoints at a URL that this machine could read")
        return checkpoint.url

    def task_config(self) -> Mapping[str, Any]:
        return self._job.spec.task.config

    def weights_place(self) -> str:
        """Return the URL of the checkpoints; the newest has the weights. Raises InvalidRequest if there is no URL."""
        return self.checkpoint_place()

    async def close(self) -> None:
        """Do nothing: the job goes on, and the connection belongs to the `Client`."""

    async def _now(self) -> JobView:
        """Read the job's current state from the API server. Raises JobDeleted."""
        self._job = await patiently(self._reader.job)
        return self._job

    def _check_not_over(self, job: JobView, what: str) -> None:
        if job.status.ended:
            raise InvalidRequest(f"{job.name} is over ({job.status.state}); it cannot be {what}")

    async def _until(self, met: Callable[[JobView], object], what: str, seconds: float | None) -> JobView:
        """Wait until the job meets a condition, and return it. Raises WaitTimedOut, JobDeleted."""
        self._job = await operations.until_so(self._reader, met, what, seconds)
        return self._job
