"""What the operator hears of: kopf's handlers, which only pass on what they see.

kopf's daemons would put a finalizer on every job, so that none could be deleted while the operator is away. Nothing
here needs one: pods go with their job by owner reference. So jobs are followed by plain events, and each one's life is
a task of ours.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import kopf

from bamboo.job.spec import DEFAULT_MANAGER
from bamboo.names import GROUP, LABEL_JOB_NAME, PLURAL, VERSION
from bamboo_operator.api import JobGone, job_place, node_place, pod_place
from bamboo_operator.cluster import owner_uid
from bamboo_operator.doors import JobKey
from bamboo_operator.farewell import Departures
from bamboo_operator.lifecycle import Life, Tools
from bamboo_operator.looks import Look
from bamboo_operator.missed import Missed
from bamboo_operator.signals import is_deleted

logger = logging.getLogger(__name__)

STUCK_SECONDS = 180.0
REVIVAL_SECONDS = 5.0


class Lives:
    """All jobs' tasks."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._lives: dict[JobKey, tuple[Life, asyncio.Task[None]]] = {}
        self._revivals: dict[JobKey, asyncio.TimerHandle] = {}
        self._stopped = False
        cluster, uid_of = tools.cluster, tools.api.uid_of
        self.jobs = Missed(self._uids, lambda key: uid_of(job_place(*key)), self._gone)
        self.pods = Missed(cluster.pod_uids, lambda key: uid_of(pod_place(*key)), cluster.pod_missed)
        self.departures = Departures(cluster, tools.doors, tools.reviews, lambda key: uid_of(job_place(*key)))
        self.nodes = Missed(cluster.node_uids, lambda name: uid_of(node_place(name)), cluster.node_missed)

    def job_event(self, kind: str | None, body: Mapping[str, Any]) -> None:
        """NB: events of a job and of one that had its name before may come in any order."""
        if self._stopped:
            return
        metadata = body["metadata"]
        key, gone = (metadata["namespace"], metadata["name"]), kind == "DELETED" or metadata.get("deletionTimestamp")
        self.jobs.seen(kind, key)
        known = self._lives.get(key)
        other = known is not None and known[0].uid != metadata["uid"]
        if known and other and (gone or not _is_later(kind, metadata, known[0].body["metadata"])):
            return
        if timer := self._revivals.pop(key, None):
            timer.cancel()
        if known and (other or gone):
            del self._lives[key]
            known[0].gone()
            known[1].cancel()
            self.departures.job_gone(key, known[0].uid)
            known = None
        elif gone:
            self.departures.job_gone(key, metadata["uid"])
        manager = (body.get("spec") or {}).get("managedBy") or DEFAULT_MANAGER
        if gone or manager != DEFAULT_MANAGER:
            return
        if known:
            known[0].seen(body)
            return
        life = Life(body, self._tools)
        task = asyncio.create_task(life.run(), name=f"{key[0]}/{key[1]}")
        task.add_done_callback(lambda done: self._ended(key, done))
        self._lives[key] = (life, task)

    def pod_seen(self, pod: Mapping[str, Any]) -> None:
        """It is known to the cluster by now."""
        if not self._stopped and is_deleted(pod):
            uid = owner_uid(pod)
            self.departures.pod_seen(pod, followed=any(life.uid == uid for life, _ in self._lives.values()))

    def _uids(self) -> dict[JobKey, str]:
        return {key: life.uid for key, (life, _) in self._lives.items()}

    def _gone(self, key: JobKey) -> None:
        self.job_event("DELETED", self._lives[key][0].body)

    def _ended(self, key: JobKey, task: "asyncio.Task[None]") -> None:
        """A life that ends by an error is a bug; it is begun again a little later."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, JobGone):
            logger.info("%s/%s is gone", *key)
            if key in self._lives and self._lives[key][1] is task:
                del self._lives[key]
            return
        logger.error("%s/%s: the operator failed: %r", *key, error, exc_info=error)
        if key in self._lives and self._lives[key][1] is task:
            body = self._lives.pop(key)[0].body
            later = asyncio.get_running_loop().call_later
            self._revivals[key] = later(REVIVAL_SECONDS, self.job_event, "MODIFIED", body)

    def living(self) -> list[Life]:
        """Those whose tasks run; from any thread."""
        return [life for life, task in tuple(self._lives.values()) if not task.done()]

    def look(self, key: JobKey) -> Look | None:
        """What is known of that job; None if it is none of ours."""
        known = self._lives.get(key)
        return known[0].look() if known else None

    def stuck(self) -> str | None:
        """Which job has not been looked after for too long, if any."""
        for key, (life, task) in self._lives.items():
            late = time.monotonic() - life.passed
            if not task.done() and late > STUCK_SECONDS:
                return f"no reconciliation of {key[0]}/{key[1]} for {late:.0f} s"
        return None

    async def stop(self) -> None:
        """For good."""
        self._stopped = True
        tasks = [task for _, task in self._lives.values()]
        self._lives.clear()
        for timer in self._revivals.values():
            timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.departures.stop()
        for missed in (self.jobs, self.pods, self.nodes):
            await missed.stop()


def _is_later(kind: str | None, job: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Of two jobs' metadata: was this one made after the known one? Times are whole seconds."""
    made, before = str(job.get("creationTimestamp")), str(known.get("creationTimestamp"))
    return made > before or (made == before and kind in (None, "ADDED"))


def registry(lives: Lives, tools: Tools) -> kopf.OperatorRegistry:
    handlers = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=handlers)
    async def job(event: Any, **_: Any) -> None:
        tools.counts.watched["job"] += 1
        lives.job_event(event["type"], event["object"])

    # NB: as indices, because then kopf lists all of them before it passes on the first job

    @kopf.index("v1", "pods", id="pod", registry=handlers, labels={LABEL_JOB_NAME: kopf.PRESENT})
    async def pod(body: Any, **_: Any) -> None:
        tools.cluster.pod_event(None, body)
        lives.pod_seen(body)

    @kopf.index("v1", "nodes", id="node", registry=handlers)
    async def node(body: Any, **_: Any) -> None:
        tools.cluster.node_event(None, body)

    @kopf.on.event("v1", "pods", id="pod-gone", registry=handlers, labels={LABEL_JOB_NAME: kopf.PRESENT})
    async def pod_gone(event: Any, **_: Any) -> None:
        tools.counts.watched["pod"] += 1
        metadata = event["object"]["metadata"]
        lives.pods.seen(event["type"], (metadata["namespace"], metadata["name"]))
        if event["type"] == "DELETED":
            tools.cluster.pod_event("DELETED", event["object"])

    @kopf.on.event("v1", "nodes", id="node-gone", registry=handlers)
    async def node_gone(event: Any, **_: Any) -> None:
        tools.counts.watched["node"] += 1
        lives.nodes.seen(event["type"], event["object"]["metadata"]["name"])
        if event["type"] == "DELETED":
            tools.cluster.node_event("DELETED", event["object"])

    return handlers


def settings() -> kopf.OperatorSettings:
    """Everything finite; only workers' pods are streamed here; kopf posts nothing by itself."""
    chosen = kopf.OperatorSettings()
    chosen.watching.label_selectors["v1/pods"] = LABEL_JOB_NAME
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    chosen.networking.error_backoffs = (1, 1, 2, 2, 3, *[5] * 720)  # an hour; then the process ends
    chosen.posting.enabled = False
    chosen.scanning.disabled = False
    chosen.persistence.finalizer = f"{GROUP}/finalizer"  # none is ever set
    return chosen
