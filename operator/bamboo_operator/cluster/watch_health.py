"""Whether kopf still watches: a watcher that fails ends with a line in the log, and the rest of the process goes on.

Nor does kopf watch what the API server did not serve yet when it looked for it, unless that changes once more later.
Such an operator would miss everything and look healthy, so it has to report that it is not.
"""

import asyncio
import time
from collections.abc import Callable, Set

PREFIX = "watcher for "  # of the names of kopf's tasks
PODS, JOBS = f"{PREFIX}pods.", f"{PREFIX}bamboojobs."
LATE_SECONDS = 60.0  # in which jobs are to be watched where pods are


class WatchHealth:
    """Remembers which watchers there were; asked from time to time in the operator's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: set[str] = set()
        self._without_jobs: dict[str, float] = {}  # namespaces, and since when

    def problem(self) -> str | None:
        """A sentence on a watcher that has ended or was never started, if there is one."""
        names = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
        now = {name for name in names if name.startswith(PREFIX)}
        self._seen |= now
        watched = {_namespace(name) for name in now}  # kopf ends the watchers of a namespace that is deleted
        self._seen = {name for name in self._seen if name.endswith("@None") or _namespace(name) in watched}
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
