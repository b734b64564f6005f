"""What the operator counts beside what it knows anyway: plain numbers, read when its metrics are asked for.

The operator's loop writes; the thread that makes the answer reads, and copies a table before it looks through it.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from bamboo.coordinator.events import Event
from bamboo.coordinator.state import CoordinatorState
from bamboo.metrics.catalog import OPERATOR_API_DURATION, OPERATOR_LAG, OPERATOR_PASS_DURATION
from bamboo.metrics.histogram import Histogram
from bamboo.metrics.job_metrics import samples, useful_seconds


@dataclass(slots=True)
class Calls:
    """To the API server. requests: by verb, resource and code; seconds: by verb and resource."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def ended(self, verb: str, path: str, code: str, seconds: float) -> None:
        """code: of the answer, or "error" if there was none."""
        resource = resource_of(path)
        self.requests[verb, resource, code] += 1
        self.seconds.setdefault((verb, resource), OPERATOR_API_DURATION.histogram()).observe(seconds)


def resource_of(path: str) -> str:
    """What a path of the API is about, without names: pods, bamboojobs/status."""
    parts = path.strip("/").split("/")
    if "namespaces" not in parts[:-2]:
        return parts[-1]
    kind, *rest = parts[parts.index("namespaces") + 2 :]
    return "/".join([kind, *rest[1:2]])


@dataclass(slots=True)
class Counts:
    """Over all jobs, also those that are gone."""

    passes: Counter[str] = field(default_factory=Counter)  # by result
    pass_seconds: Histogram = field(default_factory=OPERATOR_PASS_DURATION.histogram)
    events: Counter[str] = field(default_factory=Counter)  # by type
    lag: Histogram = field(default_factory=OPERATOR_LAG.histogram)
    watched: Counter[str] = field(default_factory=Counter)  # by kind of object


class Meter:
    """One job's counts: what this process has seen of it, from 0 on. What was counted before is in the job's status.

    A counter that went on from there would fall whenever this process is made anew, because the status is up to 15 s
    old; Prometheus takes a fall for a beginning at 0, and would count all that came before once more.

    useful, paid: worker-seconds; cost, and what it would have been on_demand: in the currency of the pools' prices;
    samples: of committed steps; signals: by source; committed: when the last step was (time).
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.useful = self.paid = self.cost = self.on_demand = 0.0
        self.samples = 0
        self.signals: Counter[str] = Counter()
        self.committed = time.time()
        self._resumed = False

    def begin(self, *, resumed: bool) -> None:
        """A coordinator is made. resumed: of a job that trains; how far that is, it is told when its workers come."""
        self.committed, self._resumed = time.time(), resumed

    def handled(self, event: Event, before: CoordinatorState, after: CoordinatorState) -> None:
        """The job's coordinator has taken in an event."""
        self._counts.events[type(event).__name__] += 1
        if after.step > before.step:
            self.committed = time.time()
            if before.step or not self._resumed:  # else those are the steps that were committed before
                self.useful += useful_seconds(before, after)
                self.samples += samples(before, after)

    def late(self, seconds: float) -> None:
        """Its tick was that late."""
        self._counts.lag.observe(max(0.0, seconds))

    def passed(self, seconds: float, *, ok: bool) -> None:
        """A pass over the job has ended."""
        self._counts.passes["ok" if ok else "failed"] += 1
        self._counts.pass_seconds.observe(seconds)
