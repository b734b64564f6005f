"""Times of a job's reconciliations, the trigger of the next one, and bursts of preemptions, which delay API calls."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from bamboo_core.kube.api import Object
from bamboo_operator.kube.attempts import FIRST_RETRY, LAST_RETRY

GATHER_SECONDS = 0.2  # from a decision to its reconciliation, since more decisions may follow at once
RECONCILE_SECONDS = 2.0  # between two reconciliations, unless the second is urgent
QUIET_SECONDS = 60.0  # between checks of a job without pods
RESYNC_SECONDS = 5.0  # between reconciliations of an unchanged job, since deadlines may pass
FINAL_EVENTS_SECONDS = 30.0  # limit for posting the events of an ended job


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSchedule:
    """Times of a job's reconciliations (time.monotonic()).

    ended: end of the last one. next: the next one if nothing changes. earliest: the next one if an input has changed.
    retry: seconds to wait after a failure. end_written: since when the job's end is in its status. over: there is
    no next one.

    A job is not over before its end is written, or another operator would run it again. After that, the job waits for
    events that cannot be posted, at most FINAL_EVENTS_SECONDS.
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
        """Return the schedule after a reconciliation from `began` to `ended`.

        ok: everything succeeded. end_written: the job's end is in its status. unposted: events are left to post.
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
        """Return the time of the next reconciliation.

        urgent: since when an urgent one is requested. changed: since when an input of a reconciliation has changed.
        Either is None if that has not happened.
        """
        times = [self.next]
        if urgent is not None:
            times.append(max(urgent, self.ended) + GATHER_SECONDS)
        if changed is not None:
            times.append(max(changed + GATHER_SECONDS, self.earliest))
        return min(times)


class ReconcileTrigger:
    """The trigger that wakes a job's reconciliation loop, with the changes since the last reconciliation began.

    urgent, changed: as in `ReconcileSchedule.due`.
    """

    def __init__(self) -> None:
        self._triggered = asyncio.Event()
        self.urgent: float | None = None
        self.changed: float | None = None

    def at_once(self) -> None:
        """Request an urgent reconciliation, as when the coordinator has decided something."""
        self.urgent = time.monotonic() if self.urgent is None else self.urgent
        self._triggered.set()

    def soon(self) -> None:
        """Note that an input of the reconciliation has changed, so that the next one comes soon."""
        self.changed = time.monotonic() if self.changed is None else self.changed
        self._triggered.set()

    def clear(self) -> None:
        """Forget all changes so far, because a reconciliation handles them now."""
        self.urgent = self.changed = None
        self._triggered.clear()

    async def wait(self, seconds: float) -> None:
        """Wait at most `seconds`, or until a change, including one since the last wait() or clear()."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._triggered.wait()
        self._triggered.clear()


@dataclass(frozen=True, slots=True)
class IdleListener:
    """A listener that wakes a job without a coordinator when its pods or their nodes change."""

    wake: Callable[[], None]

    def pod_changed(self, name: str) -> None:
        self.wake()

    def pod_deleted(self, pod: Object) -> None:
        self.wake()

    def node_deleted(self, pod: str, node: str) -> None:
        self.wake()


CALM_SECONDS = 0.3  # a burst is over after this time without a preemption
LONGEST_SECONDS = 2.0  # after which a burst that goes on delays nothing more


class Burst:
    """A burst of preemptions, over all jobs of the operator. Reconciliations wait until it is over, so that all jobs
    get new plans first.
    """

    def __init__(self) -> None:
        self._since = self._last = -math.inf  # time.monotonic()

    def noticed(self) -> None:
        """Begin or prolong the burst: a job has lost, or will lose, a worker and has its new plan."""
        now = time.monotonic()
        if now - self._last > CALM_SECONDS:
            self._since = now
        self._last = now

    async def wait_for_its_end(self) -> None:
        """Wait until the burst is over, at most LONGEST_SECONDS from its start; return at once without one."""
        while (left := min(self._last + CALM_SECONDS, self._since + LONGEST_SECONDS) - time.monotonic()) > 0:
            await asyncio.sleep(left)
