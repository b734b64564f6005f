"""The controller of all jobs: one reconciler per job, in its own task, started and stopped by watch events.

kopf's daemons would put a finalizer on every job, so that none could be deleted while the operator is away. No
finalizer is needed here: pods go with their job by owner reference.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bamboo_core.kube.api import NODES_PATH, jobs_path, pods_path
from bamboo_core.kube.errors import JobGone
from bamboo_core.names import LABEL_JOB_NAME
from bamboo_operator.cluster.resync import Known, Resync, Watched
from bamboo_operator.jobs.late_workers import DeletedJobs
from bamboo_operator.jobs.reconciler import JobReconciler
from bamboo_operator.jobs.shared import SharedResources
from bamboo_operator.kube.objects import JobIdentity, JobKey
from bamboo_operator.status.facts import OperatedJob

logger = logging.getLogger(__name__)

STUCK_SECONDS = 180.0
RESTART_SECONDS = 5.0


class JobController:
    """The owner of each job's `JobReconciler`, which it starts, wakes and ends as watch events come."""

    def __init__(self, shared: SharedResources) -> None:
        self._shared = shared
        self._reconcilers: dict[JobKey, JobReconciler] = {}
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}  # of the same jobs
        self._deletions: dict[str, asyncio.Task[None]] = {}  # by a job's uid: writes the status of a job being deleted
        self._stopped = False
        self._deleted_jobs = DeletedJobs(shared, self._manages)
        shared.gateway.serve_closed_paths(self._deleted_jobs.channels_for)
        self.resync = Resync(
            (
                Watched("BambooJobs", self._known_jobs, self._jobs, shown=False),  # without jobs being deleted
                Watched("pods", shared.cluster.known_pods, self._pods),
                Watched("nodes", shared.cluster.known_nodes, self._nodes),
            )
        )
        self._resyncing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the resync, which finds deletions that no watch has reported."""
        self._resyncing = asyncio.create_task(self.resync.run(), name="resync")

    def begin(self, body: Mapping[str, Any]) -> None:
        """Start to reconcile a job, in place of an earlier job of the same name. Do nothing after stop(), or if a later
        job of that name is known.
        """
        key, known = _key(body), self._reconcilers.get(_key(body))
        if self._stopped or (known and _made(body) < _made(known.body)):  # an earlier job of this name
            return
        if known:
            self._end(key)
        self._reconcilers[key] = JobReconciler(body, self._shared)
        self._tasks[key] = asyncio.create_task(self._reconcile(key), name=f"{key[0]}/{key[1]}")

    def edited(self, body: Mapping[str, Any]) -> None:
        """Pass an edited job on to its reconciler. Do nothing if this operator does not manage the job."""
        if self._manages(_identity(body)):
            self._reconcilers[_key(body)].edited(body)

    def handled_generation(self, body: Mapping[str, Any]) -> int | None:
        """Return the generation of the spec that the job's reconciler has; None if this operator does not manage the
        job.
        """
        if not self._manages(_identity(body)):
            return None
        generation: int | None = self._reconcilers[_key(body)].body["metadata"].get("generation")
        return generation

    async def _reconcile(self, key: JobKey) -> None:
        """Run a job's reconciler until the job is gone. After an error, which is a bug, pause and start a new one."""
        while True:
            job = self._reconcilers[key]
            try:
                await job.run()
                return
            except JobGone:
                logger.info("%s/%s is gone", *key)
                if self._reconcilers.get(key) is job:
                    del self._reconcilers[key], self._tasks[key]
                return
            except Exception as error:
                logger.error("%s/%s: the operator failed: %r", *key, error, exc_info=error)
            await asyncio.sleep(RESTART_SECONDS)
            self._reconcilers[key] = job.again()

    def end(self, body: Mapping[str, Any], *, gone: bool) -> None:
        """Stop reconciling a job. gone: True if it was deleted; False if its deletion has only begun, in which case a
        task writes a status that shows nothing running. Do nothing after stop(), or for another job of that name.
        """
        key, uid = _key(body), body["metadata"]["uid"]
        known = self._reconcilers.get(key)
        if self._stopped or (known and known.uid != uid):
            return
        running = self._end(key) if known else None
        if not gone and uid not in self._deletions:  # an earlier operator may have started it without writing a status
            writing = self._write_deletion(known or JobReconciler(body, self._shared), running)
            task = self._deletions[uid] = asyncio.create_task(writing, name=f"deletion of {key[0]}/{key[1]}")
            task.add_done_callback(lambda _: self._deletions.pop(uid))

    def _end(self, key: JobKey) -> "asyncio.Task[None]":
        """Stop a job's reconciler and its connected workers; return the reconciler's task, which is cancelled."""
        job, task = self._reconcilers.pop(key), self._tasks.pop(key)
        job.deleted()
        task.cancel()
        return task

    async def _write_deletion(self, job: JobReconciler, running: "asyncio.Task[None] | None") -> None:
        if running is not None:
            await asyncio.wait({running})
        await job.write_deletion()

    def _manages(self, job: JobIdentity) -> bool:
        return (known := self._reconcilers.get(job.key)) is not None and known.uid == job.uid

    def _known_jobs(self) -> Known:
        return {job.uid: partial(self.end, job.body, gone=True) for job in self._reconcilers.values()}

    async def _jobs(self) -> set[str]:
        return await self._uids(jobs_path)

    async def _pods(self) -> set[str]:
        return await self._uids(pods_path, f"{LABEL_JOB_NAME},{LABEL_JOB_NAME}!=")

    async def _nodes(self) -> set[str]:
        """Return the UIDs and the names of all nodes."""
        found = await self._shared.api.metadata(NODES_PATH)
        return {str(node[key]) for node in found for key in ("uid", "name")}

    async def _uids(self, path: Callable[[str | None], str], labels: str = "") -> set[str]:
        places = [path(namespace) for namespace in self._shared.namespaces or (None,)]
        return {str(one["uid"]) for place in places for one in await self._shared.api.metadata(place, labels)}

    def running(self) -> list[JobReconciler]:
        """Return the reconcilers of the jobs whose tasks run. Safe in any thread."""
        tasks = dict(self._tasks)
        return [job for key, job in dict(self._reconcilers).items() if key in tasks and not tasks[key].done()]

    def known(self, key: JobKey) -> OperatedJob | None:
        """Return the facts of a job; None if this operator does not manage it."""
        found = self._reconcilers.get(key)
        return found.known() if found else None

    def stuck(self) -> str | None:
        """Return a sentence about a broken watch or a job without progress for STUCK_SECONDS; None if all is well."""
        if problem := self.resync.problem():
            return problem
        for job in self.running():
            late = time.monotonic() - job.attempts.last_progress
            if late > STUCK_SECONDS:
                return f"no reconciliation of {job.key[0]}/{job.key[1]} for {late:.0f} s"
        return None

    async def stop(self) -> None:
        """Stop all reconcilers and the resync for good; pods stay."""
        self._stopped = True
        tasks = [*self._tasks.values(), *self._deletions.values(), *([self._resyncing] if self._resyncing else [])]
        self._reconcilers.clear()
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._deleted_jobs.stop()


def _key(job: Mapping[str, Any]) -> JobKey:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _identity(job: Mapping[str, Any]) -> JobIdentity:
    return JobIdentity(_key(job), job["metadata"]["uid"])


def _made(job: Mapping[str, Any]) -> str:
    """Return a job's creationTimestamp: text in whole seconds of UTC, which sorts by time."""
    return str(job["metadata"].get("creationTimestamp"))
