"""All jobs of an operator: a reconciler for each, in a task of its own, begun and ended by watch events.

kopf's daemons would put a finalizer on every job, so that none could be deleted while the operator is away. Nothing
here needs one: pods go with their job by owner reference.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bamboo_core.kube.api import NODES_PATH, job_path, jobs_path, pods_path
from bamboo_core.kube.errors import JobGone
from bamboo_core.names import LABEL_JOB_NAME
from bamboo_operator.cluster.resync import Known, Resync
from bamboo_operator.jobs.late_workers import DeletedJobs
from bamboo_operator.jobs.reconciler import JobReconciler
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.objects import JobKey, job_of, owner_uid
from bamboo_operator.signals.signals import is_deleted
from bamboo_operator.status.operated_job import OperatedJob

logger = logging.getLogger(__name__)

STUCK_SECONDS = 180.0
RESTART_SECONDS = 5.0


class JobController:
    """Begins, tells and ends the jobs' reconcilers."""

    def __init__(self, shared: SharedResources) -> None:
        self._shared = shared
        self._reconcilers: dict[JobKey, tuple[JobReconciler, asyncio.Task[None]]] = {}
        self._restarts: dict[JobKey, asyncio.TimerHandle] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}  # by a job's uid: writes its status, as it is being deleted
        self._stopped = False
        uid_of = shared.api.uid_of
        self.deleted_jobs = DeletedJobs(
            shared.cluster, shared.gateway, shared.reviews, lambda key: uid_of(job_path(*key))
        )
        kinds = (
            (self._known_jobs, self._jobs),
            (shared.cluster.known_pods, self._pods),
            (shared.cluster.known_nodes, self._nodes),
        )
        self.resync = Resync(kinds)
        self._resyncing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to look for deletions that no watch has reported."""
        self._resyncing = asyncio.create_task(self.resync.run(), name="resync")

    def job_event(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """Events of a job and of one that had its name before may come in any order."""
        if self._stopped:
            return
        metadata = body["metadata"]
        key, gone = (metadata["namespace"], metadata["name"]), kind == "DELETED" or metadata.get("deletionTimestamp")
        known = self._reconcilers.get(key)
        other = known is not None and known[0].uid != metadata["uid"]
        if known and other and (gone or not _is_later(kind, metadata, known[0].body["metadata"])):
            return
        if timer := self._restarts.pop(key, None):
            timer.cancel()
        if known and (other or gone):
            del self._reconcilers[key]
            known[0].deleted()
            known[1].cancel()
            self.deleted_jobs.job_deleted(key, known[0].uid)
            if gone and kind != "DELETED":
                self._write_deletion(*known)
            known = None
        elif gone:
            self.deleted_jobs.job_deleted(key, metadata["uid"])
            if kind != "DELETED":  # its deletion began under another operator, which may not have written so
                self._write_deletion(JobReconciler(body, self._shared))
        if gone:
            return
        if known:
            known[0].edited(body)
            return
        reconciler = JobReconciler(body, self._shared)
        task = asyncio.create_task(reconciler.run(), name=f"{key[0]}/{key[1]}")
        task.add_done_callback(lambda done: self._ended(key, done))
        self._reconcilers[key] = (reconciler, task)

    def _write_deletion(self, job: JobReconciler, running: "asyncio.Task[None] | None" = None) -> None:
        """Write the status of a job that is being deleted, unless that is under way.

        running: the task that reconciles the job, if there is one; it ends first.
        """
        if job.uid in self._deletions:
            return

        async def write() -> None:
            if running is not None:
                await asyncio.wait({running})
            await job.write_deletion()

        task = asyncio.create_task(write(), name=f"deletion of {job.key[0]}/{job.key[1]}")
        self._deletions[job.uid] = task
        task.add_done_callback(lambda _: self._deletions.pop(job.uid))

    def pod_changed(self, pod: Mapping[str, Any]) -> None:
        """It is in the cluster's cache by now."""
        job = job_of(pod)
        if not self._stopped and job is not None and (is_deleted(pod) or not pod["metadata"].get("ownerReferences")):
            uid = owner_uid(pod)
            self.deleted_jobs.pod_changed(pod, followed=any(job.uid == uid for job, _ in self._reconcilers.values()))

    def _known_jobs(self) -> Known:
        return {job.uid: partial(self.job_event, "DELETED", job.body) for job, _ in self._reconcilers.values()}

    async def _jobs(self) -> set[str]:
        return await self._uids(jobs_path)

    async def _pods(self) -> set[str]:
        return await self._uids(pods_path, LABEL_JOB_NAME)

    async def _nodes(self) -> set[str]:
        """Names, too: of a node that was never listed only its pods know."""
        found = await self._shared.api.metadata(NODES_PATH)
        return {str(node[key]) for node in found for key in ("uid", "name")}

    async def _uids(self, path: Callable[[str | None], str], labels: str = "") -> set[str]:
        places = [path(namespace) for namespace in self._shared.namespaces or (None,)]
        return {str(one["uid"]) for place in places for one in await self._shared.api.metadata(place, labels)}

    def _ended(self, key: JobKey, task: "asyncio.Task[None]") -> None:
        """A reconciler that ends by an error is a bug; another one is begun a little later."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, JobGone):
            logger.info("%s/%s is gone", *key)
            if key in self._reconcilers and self._reconcilers[key][1] is task:
                del self._reconcilers[key]
            return
        logger.error("%s/%s: the operator failed: %r", *key, error, exc_info=error)
        if key in self._reconcilers and self._reconcilers[key][1] is task:
            body = self._reconcilers.pop(key)[0].body
            later = asyncio.get_running_loop().call_later
            self._restarts[key] = later(RESTART_SECONDS, self.job_event, "MODIFIED", body)

    def running(self) -> list[JobReconciler]:
        """Those whose tasks run; from any thread."""
        return [job for job, task in tuple(self._reconcilers.values()) if not task.done()]

    def known(self, key: JobKey) -> OperatedJob | None:
        """What is known of that job; None if it is none of ours."""
        found = self._reconcilers.get(key)
        return found[0].known() if found else None

    def stuck(self) -> str | None:
        """A sentence on a job that has not been reconciled for too long, if there is one."""
        for key, (job, task) in self._reconcilers.items():
            late = time.monotonic() - job.last_progress
            if not task.done() and late > STUCK_SECONDS:
                return f"no reconciliation of {key[0]}/{key[1]} for {late:.0f} s"
        return None

    async def stop(self) -> None:
        """For good."""
        self._stopped = True
        tasks = [*(task for _, task in self._reconcilers.values()), *self._deletions.values()]
        self._reconcilers.clear()
        for timer in self._restarts.values():
            timer.cancel()
        if self._resyncing:
            tasks.append(self._resyncing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.deleted_jobs.stop()


def _is_later(kind: str | None, job: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Was this job made after the known one, by the metadata of both? Times are whole seconds."""
    made, before = str(job.get("creationTimestamp")), str(known.get("creationTimestamp"))
    return made > before or (made == before and kind in (None, "ADDED"))
