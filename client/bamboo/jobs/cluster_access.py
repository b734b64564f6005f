"""The way of a program to a cluster, and the jobs there, in the loop in the background."""

import asyncio
import atexit
from typing import Any, Final

from bamboo.jobs import background
from bamboo.jobs.cluster_job import ClusterJob, told
from bamboo.jobs.errors import InvalidRequest
from bamboo.jobs.results import JobProgress, progress_of
from bamboo.remote import operations
from bamboo.remote.session import NAME, patiently
from bamboo.remote.watch import INTERVAL_SECONDS
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.kubeconfig import load
from bamboo_core.view.job_view import JobView, view_of


class ClusterAccess:
    """The way to a cluster, in the loop in the background. It is open until the program ends.

    namespace: of jobs whose manifest names none. Raises what `told` raises.
    """

    def __init__(self, namespace: str | None, context: str | None, kubeconfig: str | None) -> None:
        with told():
            access = load(kubeconfig, context)
        self.namespace = namespace or access.namespace
        if not NAME.fullmatch(self.namespace):
            raise InvalidRequest(f"namespace {self.namespace}: expected the name of a namespace")
        self._api, self._opened = KubeApi(access), asyncio.Lock()
        self._is_open = False

    async def api(self) -> KubeApi:
        async with self._opened:
            if not self._is_open:
                await self._api.__aenter__()
                self._is_open = True
                _OPEN.append(self._api)
        return self._api

    async def submit(self, document: dict[str, Any], *, apply: bool, force: bool, dry_run: bool) -> ClusterJob:
        namespace = str(document["metadata"].get("namespace") or self.namespace)
        with told():
            api = await self.api()
            _, after = await operations.put(api, namespace, document, apply=apply, force=force, dry_run=dry_run)
        return ClusterJob(api, after)

    async def job(self, name: str) -> ClusterJob:
        with told():
            api = await self.api()
            return ClusterJob(api, view_of(await api.job(self.namespace, name)))

    async def jobs(self) -> list[ClusterJob]:
        with told():
            api = await self.api()
            return [ClusterJob(api, job) for job in await self._views()]

    async def changes(self, shown: dict[str, JobProgress]) -> list[JobProgress]:
        """Which jobs are not as they were shown, as soon as one is not. shown: by uid; it is brought up to date."""
        while True:
            with told():
                now = {job.uid: progress_of(job) for job in await patiently(self._views)}
            new = [progress for uid, progress in now.items() if shown.get(uid) != progress]
            shown.clear()
            shown |= now
            if new:
                return new
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _views(self) -> list[JobView]:
        bodies = await (await self.api()).jobs(self.namespace)
        return sorted(map(view_of, bodies), key=lambda job: job.name)


async def cluster_access(namespace: str | None, context: str | None, kubeconfig: str | None) -> ClusterAccess:
    """The way to the cluster that these name, made in the loop. Raises InvalidRequest, ClusterError."""
    return ClusterAccess(namespace, context, kubeconfig)


_OPEN: Final[list[KubeApi]] = []


@atexit.register
def _close_all() -> None:
    async def close() -> None:
        for api in _OPEN:
            await api.__aexit__(None, None, None)

    if _OPEN:
        background.call(close())
