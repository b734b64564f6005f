"""Whether kopf watches: a watcher that fails ends with a line in the log, and the rest of the process goes on.

Nor does kopf watch what the API server did not serve yet when it looked for it, unless that changes again later. What
the API server refuses kopf asks again, for an hour. Such an operator would miss everything and look healthy, so it has
to report that it is not.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Set
from types import SimpleNamespace

import aiohttp

from bamboo_core.complaints import said_by

logger = logging.getLogger(__name__)

LOGIN = "credentials"
PREFIX = "watcher for "  # of the names of kopf's tasks
PODS, JOBS = f"{PREFIX}pods.", f"{PREFIX}bamboojobs."
RETRIED = (403, 429)  # as all from 500 on: what kopf asks again
CLUSTER_WIDE = "None"  # as kopf names it
LATE_SECONDS = 60.0  # in which jobs are to be watched where pods are


class WatchHealth:
    """Remembers which watchers there were; asked from time to time in the operator's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: set[str] = set()
        self._without_jobs: dict[str, float] = {}  # namespaces, and since when
        self._listed: set[tuple[str, str]] = set()  # plural and namespace of watches that were answered
        self._unanswered: set[str] = set()  # paths of requests that failed and have to be answered yet

    def trace(self) -> aiohttp.TraceConfig:
        """Return what follows the requests of a session of kopf's."""
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._on_answer)
        trace.on_request_exception.append(self._on_exception)
        return trace

    async def _on_answer(self, _: object, __: SimpleNamespace, answered: aiohttp.TraceRequestEndParams) -> None:
        status = answered.response.status
        if status in RETRIED or status >= 500:
            self.failed(answered.url.path, f"{status} {answered.response.reason}")
        if status >= 400:
            return
        if answered.url.query.get("watch") == "true":  # kopf lists before it watches
            *_, above, namespace, plural = ("", *answered.url.path.split("/"))
            self._listed.add((plural, namespace if above == "namespaces" else CLUSTER_WIDE))
        if self._unanswered:
            self._unanswered -= {answered.url.path, LOGIN}
            if not self._unanswered:
                logger.info("the API server answers all watches again")

    async def _on_exception(self, _: object, __: SimpleNamespace, failed: aiohttp.TraceRequestExceptionParams) -> None:
        if not isinstance(failed.exception, asyncio.CancelledError):
            self.failed(failed.url.path, said_by(failed.exception))

    def failed(self, path: str, why: str) -> None:
        """Log once that a path, or a login, fails: kopf tries again and again, and its words are not logged."""
        if not self._unanswered:
            logger.warning("the API server does not answer a watch, and is asked again: %s: %s", path, why)
        self._unanswered.add(path)

    def unlisted(self) -> str | None:
        """Return a sentence on a watch that does not run yet; None if all have listed what there is."""
        watchers = {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(PREFIX)}
        if not any(name.startswith(JOBS) for name in watchers):
            return "waiting for the watch of BambooJobs"
        kinds = {(name.removeprefix(PREFIX).partition(".")[0], _namespace(name)) for name in watchers}
        missing = sorted(plural for plural, _ in kinds - self._listed)
        return f"waiting for the watch of {missing[0]}" if missing else None

    def problem(self) -> str | None:
        """A sentence on a watcher that has ended or was never started, if there is one."""
        names = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
        now = {name for name in names if name.startswith(PREFIX)}
        self._seen |= now
        watched = {_namespace(name) for name in now}  # kopf ends the watchers of a namespace that is deleted
        self._seen = {name for name in self._seen if _namespace(name) == CLUSTER_WIDE or _namespace(name) in watched}
        missing = sorted(self._seen - now)
        return f"the {missing[0]} has ended" if missing else self._jobs_not_watched(now)

    def jobs_unwatched(self) -> bool:
        """Is there no watcher of jobs, not yet or no more? kopf ends them with their CRD, or with a namespace."""
        return not any(task.get_name().startswith(JOBS) for task in asyncio.all_tasks() if not task.done())

    def _jobs_not_watched(self, now: Set[str]) -> str | None:
        at = self._clock()
        served = {_namespace(name) for name in now if name.startswith(JOBS)}
        without = {_namespace(name) for name in now if name.startswith(PODS)} - served
        self._without_jobs = {namespace: self._without_jobs.get(namespace, at) for namespace in without}
        if all(at - since <= LATE_SECONDS for since in self._without_jobs.values()):
            return None
        return "BambooJobs are not watched: there was no CRD of them when the operator started"


def _namespace(name: str) -> str:
    return name.rpartition("@")[2]


class KopfRepetitions(logging.Filter):
    """Drops what kopf says of each try of a request that fails: every few seconds, an ERROR for every watch."""

    def filter(self, record: logging.LogRecord) -> bool:
        repeated = record.getMessage().startswith(("Request attempt #", "Activity 'login' failed temporarily"))
        return not (repeated and record.name.startswith("kopf"))
