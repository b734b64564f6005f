"""A reader of a job with its workers and events, which names the parts that the user may not see."""

import asyncio
from collections.abc import Awaitable

from bamboo.remote.parsing import events_of, workers_of
from bamboo.terminal.snapshot import JobSnapshot
from bamboo_core.kube.api import KubeApi, Object
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.names import EXIT_FAILED
from bamboo_core.view.job_view import JobView, view_of


class JobDeleted(RemoteError):
    """Error because the job was deleted or replaced while a command watched it."""

    code = EXIT_FAILED


class JobReader:
    """A reader that follows one job by its uid, not a later job of the same name. It reads each worker's node once.

    uid: the job's UID; "" takes the UID of the job that is read first.
    """

    def __init__(self, api: KubeApi, namespace: str, name: str, uid: str = "") -> None:
        self._api, self.namespace, self.name, self._uid = api, namespace, name, uid
        self._nodes: dict[str, Object] = {}
        self._asked: set[str] = set()

    async def job(self) -> JobView:
        """Read the job. Raises JobDeleted if the job with the known uid is gone or replaced, or other RemoteErrors."""
        try:
            job = view_of(await self._api.job(self.namespace, self.name))
        except ApiError as error:
            if not self._uid or error.status != 404:
                raise
            raise JobDeleted(f"job {self.name} was deleted") from None
        if self._uid not in ("", job.uid):
            raise JobDeleted(f"job {self.name} was deleted, and another one of that name was created")
        self._uid = job.uid
        return job

    async def snapshot(self, *, pod_events: bool = False) -> JobSnapshot:
        """Read the job with its workers and events; with pod_events also its pods' events. Raises as `job` does.

        Parts that the user may not see are left out and named in `missing`.
        """
        job = await self.job()
        (pods, no_pods), (of_job, no_events), (of_pods, no_more) = await asyncio.gather(
            _allowed(self._api.pods(self.namespace, self.name), "workers"),
            _allowed(self._api.events(self.namespace, "BambooJob", self.name), "events"),
            _allowed(self._api.events(self.namespace, "Pod") if pod_events else _none(), "pods' events"),
        )
        unknown = {str(p["spec"].get("nodeName") or "") for p in pods} - self._asked - {""}
        self._asked |= unknown
        self._nodes |= await self._api.nodes(unknown)
        return JobSnapshot(
            job=job,
            workers=workers_of(job, pods, self._nodes),
            events=tuple(events_of(job, of_job, of_pods, [p["metadata"]["name"] for p in pods])),
            missing=tuple(problem for problem in (no_pods, no_events, no_more) if problem),
        )


async def _allowed(asked: Awaitable[list[Object]], what: str) -> tuple[list[Object], str]:
    """Return the objects and ""; if the user may not see them (403), no objects and a sentence that says so."""
    try:
        return await asked, ""
    except ApiError as error:
        if error.status != 403:
            raise
        return [], f"{what}: {error}"


async def _none() -> list[Object]:
    return []
