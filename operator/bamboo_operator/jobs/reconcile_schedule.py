"""When a job is reconciled again, and when its end counts as recorded. Pure, but for who is told of pods."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bamboo.kube.request_parts import Object

RECONCILE_SECONDS = 2.0  # between two reconciliations of a job that trains, if nothing happens
RESYNC_SECONDS = 60.0  # of a job that is idle: edits, its pods and its deadline wake it
FINAL_EVENTS_SECONDS = 30.0  # for the events of a job that is over
FIRST_RETRY, LAST_RETRY = 0.5, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOutcome:
    """Which parts of a reconciliation succeeded. finished: had the job ended before it began, so that the status says
    so if it was written? unposted: are there events left?
    """

    pods: bool
    events: bool
    status: bool
    finished: bool = False
    unposted: bool = False

    @property
    def ok(self) -> bool:
        return self.pods and self.events and self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileSchedule:
    """pause: seconds until the next reconciliation, unless something happens before; retry: the pause after the next
    failure. end_written: since when the job's end is in its status; over: there is nothing left to do.

    Nothing counts as over before the status is written: another operator would run the job again. Events that cannot
    be posted hold it up for a while only.
    """

    pause: float = 0.0
    retry: float = FIRST_RETRY
    end_written: float = math.inf
    over: bool = False

    def after(self, outcome: ReconcileOutcome, began: float) -> "ReconcileSchedule":
        """began: when that reconciliation did."""
        end_written, over = self.end_written, False
        if outcome.finished and outcome.status:
            end_written = min(end_written, began)
            over = not outcome.unposted or began - end_written > FINAL_EVENTS_SECONDS
        if outcome.ok:
            return ReconcileSchedule(pause=RECONCILE_SECONDS, end_written=end_written, over=over)
        retry = min(2 * self.retry, LAST_RETRY)
        return ReconcileSchedule(pause=self.retry, retry=retry, end_written=end_written, over=over)

    @property
    def finished(self) -> bool:
        """Is the job's end in its status?"""
        return self.end_written < math.inf


def idle_pause(now: float, deadline: float, *, pods_left: bool) -> float:
    """Seconds until an idle job (suspended, not valid, or over) is looked at again, if nothing happens to it before.

    deadline: math.inf if it has none. pods_left: some that should go have not ended.
    """
    return max(0.0, min(RECONCILE_SECONDS if pods_left else RESYNC_SECONDS, deadline - now))


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
