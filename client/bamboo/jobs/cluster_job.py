"""A job on a cluster, as the loop in the background sees it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from bamboo.jobs.errors import (
    ClusterError,
    InvalidRequest,
    JobError,
    JobFailed,
    JobInterrupted,
    JobUnrecoverable,
    NotInTime,
)
from bamboo.jobs.results import HistoryRows, JobProgress, Occurrence, progress_of
from bamboo.remote import operations
from bamboo.remote.job_reader import JobDeleted, JobReader, UnseenEvents
from bamboo.remote.session import WaitTimedOut, patiently
from bamboo.remote.victims import VictimChoice, victim
from bamboo.remote.watch import INTERVAL_SECONDS
from bamboo.terminal.snapshot import JobSnapshot
from bamboo_core.history.files import find
from bamboo_core.history.records import HistoryError
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import RemoteError, UsageError
from bamboo_core.names import EXIT_OK, EXIT_UNRECOVERABLE
from bamboo_core.storage.errors import StorageError
from bamboo_core.view.job_view import JobView

GONE_SECONDS: Final = 600.0  # for workers to end, which may write a checkpoint first


@contextmanager
def told(name: str = "") -> Iterator[None]:
    """Raises what goes wrong on the way to the cluster, or there, as the errors of the Python API. name: the job's."""
    try:
        yield
    except JobDeleted:
        raise JobInterrupted(name, "Deleted", "the job was deleted") from None
    except WaitTimedOut as error:
        raise NotInTime(str(error)) from None
    except UsageError as error:
        raise InvalidRequest(str(error)) from None
    except RemoteError as error:
        raise ClusterError(str(error)) from None


class ClusterJob:
    """One job: another one of its name, made later, is another job. All methods are called in the loop."""

    def __init__(self, api: KubeApi, job: JobView, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """close: of the connection, if it was made for this job alone."""
        self._api, self._job, self._close = api, job, close or _nothing
        self._reader = JobReader(api, job.namespace, job.name, job.uid)

    @property
    def name(self) -> str:
        return self._job.name

    async def progress(self) -> JobProgress:
        return progress_of(await self._now())

    def feed(self) -> "ClusterFeed":
        return ClusterFeed(self)

    async def over(self) -> bool:
        return (await self._now()).status.ended is not None

    async def moment(self) -> None:
        await asyncio.sleep(INTERVAL_SECONDS)

    async def snapshot(self, *, pod_events: bool = False) -> JobSnapshot:
        """The job with its workers and events. Raises JobInterrupted if it was deleted."""
        with told(self.name):
            return await patiently(lambda: self._reader.snapshot(pod_events=pod_events))

    async def wait(self, seconds: float | None) -> JobProgress:
        """Waits until the job is complete, however often it is suspended meanwhile."""
        job = await self._until(lambda job: job.status.ended is not None, "is not over", seconds)
        end = job.status.ended
        assert end is not None
        if job.exit_code == EXIT_OK:
            return progress_of(job)
        kind: type[JobError] = JobUnrecoverable if job.exit_code == EXIT_UNRECOVERABLE else JobFailed
        raise kind(job.name, end.reason, end.message)

    async def interrupted(self) -> None:
        """The job goes on."""

    async def preempt(self, worker: str | None, *, notice: bool) -> None:
        """Deletes the pod of that worker, or of one that trains, with grace or without."""
        choice = VictimChoice(worker=worker, random=worker is None)
        snapshot = await self.snapshot()
        with told():
            chosen = victim(snapshot.job, snapshot.workers, choice, random.SystemRandom().choice)
            await operations.take_away(self._api, snapshot.job, chosen, notice=notice)

    async def scale(self, workers: int) -> None:
        """Raises InvalidRequest if the job's grid is fixed."""
        if self._job.spec.elastic is None:
            raise InvalidRequest(f"{self._job.name} cannot be scaled: without spec.elastic its grid is fixed")
        with told():
            await operations.change_spec(self._api, self._job, {"elastic": {"maxWorkers": workers}})

    async def suspend(self) -> None:
        """Raises InvalidRequest if it is over, or comes to its end meanwhile."""
        self._check_not_over(await self._now(), "suspended")
        with told():
            await operations.change_spec(self._api, self._job, {"suspend": True})
        job = await self._until(
            lambda job: job.status.holds("Suspended") or job.status.ended is not None, "was not suspended", GONE_SECONDS
        )
        self._check_not_over(job, "suspended")
        with told():
            await operations.until_no_pods(self._api, job, GONE_SECONDS)

    async def resume(self) -> None:
        """Raises InvalidRequest if it is over, or the operator keeps it suspended."""
        job = await self._now()
        self._check_not_over(job, "resumed")
        if job.held_back:
            raise InvalidRequest(f"{job.name} cannot be resumed: {job.held_back}")
        with told():
            await operations.change_spec(self._api, self._job, {"suspend": False})

    async def stop(self) -> None:
        """Deletes it, and waits until its workers are gone."""
        with told():
            await self._api.delete_job(self._job.namespace, self._job.name, self._job.uid)
            await operations.until_no_pods(self._api, self._job, GONE_SECONDS)

    async def history(self) -> HistoryRows:
        with told():
            url = operations.history_place(self._job)
        try:
            return HistoryRows(await asyncio.to_thread(lambda: find(url).read_all()))
        except (HistoryError, StorageError, ValueError) as error:
            raise InvalidRequest(f"{self.name}: {error}") from None

    def checkpoint_place(self) -> str:
        checkpoint = self._job.spec.checkpoint
        if checkpoint is None or checkpoint.url is None:
            raise InvalidRequest(f"{self.name} keeps no checkpoints at a URL that this machine could read")
        return checkpoint.url

    def task_config(self) -> Mapping[str, Any]:
        return self._job.spec.task.config

    def weights_place(self) -> str:
        """The last checkpoint has them."""
        return self.checkpoint_place()

    async def close(self) -> None:
        """The job goes on; a connection that was made for it alone is closed."""
        await self._close()

    async def _now(self) -> JobView:
        """The job as it is. Raises JobInterrupted if it was deleted."""
        with told(self.name):
            self._job = await patiently(self._reader.job)
        return self._job

    def _check_not_over(self, job: JobView, what: str) -> None:
        if job.status.ended:
            raise InvalidRequest(f"{job.name} is over ({job.status.state}); it cannot be {what}")

    async def _until(self, met: Callable[[JobView], object], what: str, seconds: float | None) -> JobView:
        """The job as soon as it is so. Raises NotInTime."""
        with told(self.name):
            self._job = await operations.until_so(self._reader, met, what, seconds)
        return self._job


async def _nothing() -> None:
    """The connection is others' as well."""


class ClusterFeed:
    """What has happened to a job since this was asked last, as far as the cluster knows it: most keep events for an
    hour. One that happens again is told again.
    """

    def __init__(self, job: ClusterJob) -> None:
        self._job, self._unseen = job, UnseenEvents()

    async def new(self) -> list[Occurrence]:
        snapshot = await self._job.snapshot(pod_events=True)
        return [
            Occurrence(time=one.at.timestamp(), reason=one.reason, message=one.message, warning=one.warning)
            for one in self._unseen.of(snapshot.events)
        ]
