"""`bamboo.Client`, which submits, lists and watches the jobs on a cluster."""

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from bamboo import background
from bamboo.job_source import JobSource
from bamboo.jobs.cluster_job import ClusterJob
from bamboo.jobs.errors import InvalidRequest
from bamboo.jobs.handle import JobHandle, call
from bamboo.jobs.results import JobProgress, progress_of
from bamboo.remote import operations
from bamboo.remote.session import patiently, way_to
from bamboo.remote.watch import INTERVAL_SECONDS
from bamboo_core.kube.api import Connection, KubeApi
from bamboo_core.view.job_view import JobView, view_of

if TYPE_CHECKING:
    from bamboo.jobs.job import Job


class Client:
    """Client for the jobs in one namespace of a cluster. Raises InvalidRequest, ClusterError.

    namespace, context, kubeconfig: as the flags of `bamboo list`; without a kubeconfig, a pod's own cluster is used.
    """

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        self._access = call(way_to(namespace, context, kubeconfig))
        self._given, self._namespace = namespace, namespace or self._access.namespace
        self._api: KubeApi | None = None  # made in the background loop, at the first request

    @property
    def namespace(self) -> str:
        return self._namespace

    def submit(self, job: "Job", *, apply: bool = False, force: bool = False, dry_run: bool = False) -> JobHandle:
        """Create the job on the cluster and return its handle. Without `apply`, raises ClusterError if it exists.

        The namespace is the manifest's, else the client's; raises InvalidRequest if the client was given another one.
        apply: merge the job into an existing one. force: only with `apply` (else InvalidRequest), also overwrite fields
        that others have set, such as by kubectl edit. dry_run: only have the API server check the job.
        """
        if force and not apply:
            raise InvalidRequest("force: expected together with apply")
        return call(self._submit(job.source, apply=apply, force=force, dry_run=dry_run))

    def job(self, name: str) -> JobHandle:
        """Return a handle of the job with this name. Raises ClusterError if there is none."""
        return call(self._job(name))

    def jobs(self) -> list[JobHandle]:
        """Return handles of all jobs in the namespace, sorted by name."""
        return call(self._jobs())

    def close(self) -> None:
        """Close the connections; jobs go on."""
        call(self._close())

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self) -> Iterator[JobProgress]:
        """Yield the progress of each job in the namespace, now and whenever it changes, forever."""
        shown: dict[str, JobProgress] = {}
        while True:
            yield from call(self._changes(shown))

    # in the background loop

    def _opened(self) -> KubeApi:
        if self._api is None:
            self._api = KubeApi(Connection(self._access))
            background.opened(self._close)
        return self._api

    async def _close(self) -> None:
        """Close the connections; a later request opens them again."""
        if self._api is not None:
            api, self._api = self._api, None
            background.closed(self._close)
            await api.close()

    async def _submit(self, job: JobSource, *, apply: bool, force: bool, dry_run: bool) -> JobHandle:
        api = self._opened()
        _, after = await operations.submit(api, job, self._given, apply=apply, force=force, dry_run=dry_run)
        return JobHandle(ClusterJob(api, after))

    async def _job(self, name: str) -> JobHandle:
        api = self._opened()
        return JobHandle(ClusterJob(api, view_of(await api.job(self._namespace, name))))

    async def _jobs(self) -> list[JobHandle]:
        api = self._opened()
        return [JobHandle(ClusterJob(api, job)) for job in await self._views()]

    async def _changes(self, shown: dict[str, JobProgress]) -> list[JobProgress]:
        """Wait until jobs' progress differs from `shown` (by uid, updated in place), and return the new progress."""
        while True:
            now = {job.uid: progress_of(job) for job in await patiently(self._views)}
            new = [progress for uid, progress in now.items() if shown.get(uid) != progress]
            shown.clear()
            shown |= now
            if new:
                return new
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _views(self) -> list[JobView]:
        bodies = await self._opened().jobs(self._namespace)
        return sorted(map(view_of, bodies), key=lambda job: job.name)
