"""Access to a cluster and its jobs, in the background loop."""

import asyncio

from bamboo import background
from bamboo.job_source import JobSource
from bamboo.jobs.cluster_job import ClusterJob, api_errors
from bamboo.jobs.results import JobProgress, progress_of
from bamboo.remote import operations
from bamboo.remote.session import patiently, way_to
from bamboo.remote.watch import INTERVAL_SECONDS
from bamboo_core.kube.api import Access, Connection, KubeApi
from bamboo_core.view.job_view import JobView, view_of


class ClusterAccess:
    """Access to a cluster, in the background loop, open until it is closed or the program ends.

    given: the namespace for manifests without one; None: that of the access.
    """

    def __init__(self, access: Access, given: str | None) -> None:
        self._access, self._given, self.namespace = access, given, given or access.namespace
        self._api: KubeApi | None = None

    def api(self) -> KubeApi:
        if self._api is None:
            self._api = KubeApi(Connection(self._access))
            background.opened(self.close)
        return self._api

    async def close(self) -> None:
        """Close the connections; a later call opens them again."""
        if self._api is not None:
            api, self._api = self._api, None
            background.closed(self.close)
            await api.close()

    async def submit(
        self, job: JobSource, *, apply: bool, force: bool, dry_run: bool, alone: bool = False
    ) -> ClusterJob:
        """Create or merge the job. alone: close the connections with the job's handle."""
        with api_errors():
            api = self.api()
            _, after = await operations.submit(api, job, self._given, apply=apply, force=force, dry_run=dry_run)
        return ClusterJob(api, after, self.close if alone else None)

    async def job(self, name: str) -> ClusterJob:
        with api_errors():
            api = self.api()
            return ClusterJob(api, view_of(await api.job(self.namespace, name)))

    async def jobs(self) -> list[ClusterJob]:
        with api_errors():
            api = self.api()
            return [ClusterJob(api, job) for job in await self._views()]

    async def changes(self, shown: dict[str, JobProgress]) -> list[JobProgress]:
        """Wait until a job's progress differs from `shown`; return what differs. shown: by uid; it is updated."""
        while True:
            with api_errors():
                now = {job.uid: progress_of(job) for job in await patiently(self._views)}
            new = [progress for uid, progress in now.items() if shown.get(uid) != progress]
            shown.clear()
            shown |= now
            if new:
                return new
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _views(self) -> list[JobView]:
        bodies = await self.api().jobs(self.namespace)
        return sorted(map(view_of, bodies), key=lambda job: job.name)


async def cluster_access(namespace: str | None, context: str | None, kubeconfig: str | None) -> ClusterAccess:
    """Open access to a cluster. Called in the loop. Raises InvalidRequest, ClusterError."""
    with api_errors():
        return ClusterAccess(await way_to(namespace, context, kubeconfig), namespace)
