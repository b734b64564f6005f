"""When a job that trains is reconciled again, and when its end counts as recorded. Pure."""

import math
from dataclasses import dataclass

RECONCILE_SECONDS = 2.0  # between two reconciliations, if nothing happens
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
