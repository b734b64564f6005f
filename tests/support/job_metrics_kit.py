"""Jobs and checkpoint counts as the operator sees them, and functions that read its metrics page."""

from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from bamboo_core.coordinator.events import (
    AbandonReason,
    CheckpointCounts,
    CheckpointSummary,
    RestoreCause,
    RestoreProblem,
    Status,
)
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import read_status
from bamboo_core.metrics.exposition import Metric, MetricKind, MetricsPage
from bamboo_operator.status.facts import OperatedJob, StatusFacts
from operator_kit import NOW, job, said, viewed

POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "0.50"},
    {"name": "sure", "capacity": "OnDemand", "pricePerHour": "2.00", "afterSeconds": 60},
]


class _Shown(Collector):
    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    def collect(self) -> Iterable[Family]:
        return self._page.families()


def exposed(page: MetricsPage) -> str:
    registry = CollectorRegistry()
    registry.register(_Shown(page))
    return generate_latest(registry).decode()


def values(page: MetricsPage, metric: Metric) -> dict[tuple[str, ...], float]:
    """Return a metric's samples (a histogram's observation counts) by its label values, except namespace and job."""
    name = f"{metric.name}_count" if metric.kind is MetricKind.HISTOGRAM else metric.name
    own = [label for label in metric.labels if label not in ("namespace", "job")]
    samples = [sample for family in page.families() for sample in family.samples if sample.name == name]
    return {tuple(sample.labels[label] for label in own): sample.value for sample in samples}


LIVE = said()


def look(
    written: object = None, facts: StatusFacts | None = None, status: Status | None = LIVE, spec: JobSpec | None = None
) -> OperatedJob:
    """Return a job as the operator sees it. written: its status in the API. status: the coordinator's, if one runs."""
    spec = spec or job(nodePools=POOLS)
    facts = facts or StatusFacts(
        now=NOW,
        generation=1,
        spec=spec,
        pods={"spot": 2, "sure": 1},
        paid={"spot": 2},
        cost=Decimal("0.25"),
    )
    return OperatedJob(view=viewed(facts.spec or spec, read_status(written), status), facts=facts)


def kept() -> CheckpointSummary:
    counts = CheckpointCounts().saved(2.0, 0.004).saved(40.0, 0.03).abandoning(AbandonReason.STORE_FAILED)
    counts = counts.restoring(RestoreCause.WORKERS_GONE).unusable(RestoreProblem.DAMAGED).repeating(12, 0.5)
    return CheckpointSummary(
        step=8, age=30.0, seconds=40.0, bytes=100, every_steps=4, counts=replace(counts, bytes=250)
    )
