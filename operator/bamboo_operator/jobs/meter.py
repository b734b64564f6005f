"""The operator's own counts: plain numbers, read at each scrape of its metrics.

The operator's loop writes them; the scraping thread reads them, and copies each table before iterating over it.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from bamboo_core.coordinator.events import Event
from bamboo_core.coordinator.job_status import trained_samples
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.histogram import Histogram
from bamboo_core.metrics.catalog import OPERATOR_RECONCILE_DURATION, OPERATOR_TICK_DELAY
from bamboo_core.metrics.job_metrics import useful_seconds


@dataclass(slots=True)
class OperatorCounts:
    """Counts over all jobs, including deleted ones."""

    reconciles: Counter[str] = field(default_factory=Counter)  # by result
    reconcile_seconds: Histogram = field(default_factory=OPERATOR_RECONCILE_DURATION.histogram)
    events: Counter[str] = field(default_factory=Counter)  # by type
    tick_delay: Histogram = field(default_factory=OPERATOR_TICK_DELAY.histogram)
    watched: Counter[str] = field(default_factory=Counter)  # by kind of object


class JobMeter:
    """One job's counts, which begin at 0 with each reconciler of the job.

    A counter that continued from the job's status would fall at each restart of the operator, because the status is up
    to 15 s old; Prometheus would then count everything again. Costs are counted elsewhere (`jobs/cost_counter`): their
    counter shows the written status.

    useful, paid: worker-seconds. samples: number of trained samples. signals: losses and notices by source. committed:
    time of the last commit or, if later, of the start of a coordinator or of this meter, in seconds since 1970.
    """

    def __init__(self, counts: OperatorCounts) -> None:
        self._counts = counts
        self.useful = self.paid = 0.0
        self.samples = 0
        self.signals: Counter[str] = Counter()
        self.committed = time.time()

    def begin(self) -> None:
        """Note that a coordinator was created: the time since the last commit begins again at 0."""
        self.committed = time.time()

    def handled(self, event: Event, before: CoordinatorState, after: CoordinatorState) -> None:
        """Count an event that the job's coordinator has handled."""
        self._counts.events[type(event).__name__] += 1
        if after.step > before.step:
            self.committed = time.time()
        if after.progress.trained > before.progress.trained:
            self.useful += useful_seconds(before, after)
            self.samples += trained_samples(after) - trained_samples(before)

    def tick_delayed(self, seconds: float) -> None:
        """Count a tick that came `seconds` late."""
        self._counts.tick_delay = self._counts.tick_delay.having(max(0.0, seconds))

    def reconciled(self, seconds: float, *, ok: bool) -> None:
        """Count a reconciliation that took `seconds`, and whether it succeeded."""
        self._counts.reconciles["ok" if ok else "failed"] += 1
        self._counts.reconcile_seconds = self._counts.reconcile_seconds.having(seconds)
