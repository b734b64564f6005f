"""When a job is reconciled again, and when its end counts as recorded. Pure, but for what tells of changes."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from bamboo_core.kube.api import Object

GATHER_SECONDS = 0.2  # from a decision to the reconciliation that it causes: when much happens, decisions come first
RECONCILE_SECONDS = 2.0  # between two reconciliations, unless the second is urgent
QUIET_SECONDS = 60.0  # after which a job without pods is looked at though nothing has happened to it
RESYNC_SECONDS = 5.0  # after which a job is reconciled though nothing has happened to it: time alone may decide
FINAL_EVENTS_SECONDS = 30.0  # for the events of a job that is over
FIRST_RETRY, LAST_RETRY = 0.5, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSchedule:
    """ended: when the last reconciliation did; next: when there is another one if nothing happens; earliest: when, if
    something has changed (time.monotonic()). retry: the pause after the next failure. end_written: since when the job's
    end is in its status; over: there is nothing left to do.

    Nothing counts as over before the status is written: another operator would run the job again. Events that cannot
    be posted hold it up for a while only.
    """

    ended: float = -math.inf
    next: float = -math.inf
    earliest: float = -math.inf
    retry: float = FIRST_RETRY
    end_written: float = math.inf
    over: bool = False

    def after(
        self, began: float, ended: float, *, ok: bool, end_written: bool = False, unposted: bool = False
    ) -> "ReconcileSchedule":
        """Return the schedule after a reconciliation. began, ended: when that did.

        ok: everything succeeded. end_written: it has written that the job has ended. unposted: there are events left.
        """
        written, over = self.end_written, False
        if end_written:
            written = min(written, began)
            over = not unposted or began - written > FINAL_EVENTS_SECONDS
        if not ok:
            at, retry = ended + self.retry, min(2 * self.retry, LAST_RETRY)
            return ReconcileSchedule(ended=ended, next=at, earliest=at, retry=retry, end_written=written, over=over)
        earliest = ended + RECONCILE_SECONDS
        at = earliest if unposted else ended + RESYNC_SECONDS
        return ReconcileSchedule(ended=ended, next=at, earliest=earliest, end_written=written, over=over)

    def due(self, urgent: float | None, changed: float | None) -> float:
        """When the job is reconciled again. urgent: since when something has to be done; changed: since when something
        that a reconciliation looks at is different; None if nothing is.
        """
        times = [self.next]
        if urgent is not None:
            times.append(max(urgent, self.ended) + GATHER_SECONDS)
        if changed is not None:
            times.append(max(changed + GATHER_SECONDS, self.earliest))
        return min(times)


class ReconcileTrigger:
    """What happens to a job between two reconciliations.

    urgent, changed: as in `ReconcileSchedule.due`, since the last one began.
    """

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self.urgent: float | None = None
        self.changed: float | None = None

    def at_once(self) -> None:
        """Note that something is to be done."""
        self.urgent = time.monotonic() if self.urgent is None else self.urgent
        self._told.set()

    def soon(self) -> None:
        """Note that something has changed, so that there may be something to do."""
        self.changed = time.monotonic() if self.changed is None else self.changed
        self._told.set()

    def clear(self) -> None:
        """Forget what has happened so far: it is looked at now."""
        self.urgent = self.changed = None
        self._told.clear()

    async def wait(self, seconds: float) -> None:
        """Wait at most that long; less if something happens, or has happened since the last wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._told.wait()
        self._told.clear()


@dataclass(frozen=True, slots=True)
class IdleListener:
    """Wakes a job that has no coordinator when something happens to its pods or their nodes."""

    wake: Callable[[], None]

    def pod_changed(self, name: str) -> None:
        self.wake()

    def pod_deleted(self, pod: Object) -> None:
        self.wake()

    def node_deleted(self, pod: str, node: str) -> None:
        self.wake()
