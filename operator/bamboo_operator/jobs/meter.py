"""What the operator counts beside what it knows anyway: plain numbers, read when its metrics are asked for.

The operator's loop writes; the thread that makes the answer reads, and copies a table before it looks through it.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from bamboo_core.coordinator.events import Event
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.metrics.histogram import Histogram
from bamboo_core.metrics.job_metrics import samples, useful_seconds
from bamboo_core.metrics.operator_catalog import OPERATOR_RECONCILE_DURATION, OPERATOR_TICK_DELAY


@dataclass(slots=True)
class OperatorCounts:
    """Over all jobs, also those that are gone."""

    reconciles: Counter[str] = field(default_factory=Counter)  # by result
    reconcile_seconds: Histogram = field(default_factory=OPERATOR_RECONCILE_DURATION.histogram)
    events: Counter[str] = field(default_factory=Counter)  # by type
    tick_delay: Histogram = field(default_factory=OPERATOR_TICK_DELAY.histogram)
    watched: Counter[str] = field(default_factory=Counter)  # by kind of object


class JobMeter:
    """One job's counts: what this process has seen of it, from 0 on. What was counted before is in the job's status.

    A counter that went on from there would fall whenever this process is made anew, because the status is up to 15 s
    old; Prometheus takes a fall for a beginning at 0, and would count all that came before once more. Costs are not
    here: their counters are what is written in the status, which never falls (`jobs/cost_counter`).

    useful, paid: worker-seconds; samples: of committed steps; signals: by source; committed: when the last step was
    (time).
    """

    def __init__(self, counts: OperatorCounts) -> None:
        self._counts = counts
        self.useful = self.paid = 0.0
        self.samples = 0
        self.signals: Counter[str] = Counter()
        self.committed = time.time()

    def begin(self) -> None:
        """A coordinator is made."""
        self.committed = time.time()

    def handled(self, event: Event, before: CoordinatorState, after: CoordinatorState) -> None:
        """The job's coordinator has handled an event."""
        self._counts.events[type(event).__name__] += 1
        if after.step > before.step:
            self.committed = time.time()
        if after.progress.trained > before.progress.trained:
            self.useful += useful_seconds(before, after)
            self.samples += samples(before, after)

    def tick_delayed(self, seconds: float) -> None:
        """The coordinator's tick came that much later than due."""
        self._counts.tick_delay.observe(max(0.0, seconds))

    def reconciled(self, seconds: float, *, ok: bool) -> None:
        """The job was reconciled once."""
        self._counts.reconciles["ok" if ok else "failed"] += 1
        self._counts.reconcile_seconds.observe(seconds)
