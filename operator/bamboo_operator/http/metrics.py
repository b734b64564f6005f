"""The metrics of the operator and its jobs, read anew at each scrape, so that a deleted job has none."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import version

from bamboo_core.coordinator.events import CheckpointSummary
from bamboo_core.job.status import BambooJobStatus, CheckpointStatus
from bamboo_core.metrics import catalog, job_metrics
from bamboo_core.metrics.exposition import Metric, MetricsPage
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.jobs.reconciler import JobReconciler
from bamboo_operator.kube.access import ApiCallCounts
from bamboo_operator.kube.objects import JobKey
from bamboo_operator.pods.rollout import RolloutRecord, RolloutState
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import OperatedJob

IDLE_STATES = ("Suspended", "Invalid", "Complete", "Failed")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """The objects from which each scrape reads the operator's metrics."""

    reconcilers: Callable[[], Collection[JobReconciler]]  # of all jobs of this operator
    gateway: WorkerGateway
    calls: ApiCallCounts
    counts: OperatorCounts

    def fill(self, page: MetricsPage) -> None:
        """Add all metrics to the page; if a job's metrics fail, log that and go on. Safe in any thread."""
        states = dict.fromkeys(catalog.STATES, 0)
        reconcilers = self.reconcilers()
        for job in reconcilers:
            try:
                states[job_page(page, job.known(), job.meter)] += 1
            except Exception:  # an error in one job must not hide the metrics of others
                logger.exception("%s/%s: no metrics", *job.key)
        _operator(page, self)
        now = time.monotonic()
        page.add(
            catalog.OPERATOR_OLDEST_RECONCILE,
            max((now - job.attempts.last_progress for job in reconcilers), default=0.0),
        )
        page.add(catalog.OPERATOR_EVENT_QUEUE, sum(job.runner.event_queue_depth for job in reconcilers if job.runner))
        for state, count in states.items():
            page.add(catalog.OPERATOR_JOBS, count, state)


def job_page(page: MetricsPage, known: OperatedJob, meter: JobMeter) -> str:
    """Add a job's metrics to the page, and return the job's state."""
    job, status = _key(known), known.view.live
    status_now = job_status(status, known.view.status, known.facts)
    state = status_now.state
    for name in catalog.STATES:
        page.add(catalog.JOB_STATE, name == state, *job, name)
    for condition in status_now.conditions:
        page.add(catalog.JOB_CONDITION, condition.holds, *job, condition.type)
        if condition.type == "Protected":
            page.add(catalog.JOB_PROTECTED, condition.holds, *job, condition.reason)
    _workers(page, job, status_now)
    _rollout(page, job, known.facts.rollout)
    _pods(page, job, known, idle=state in IDLE_STATES)
    page.add(catalog.JOB_LAST_COMMIT, meter.committed, *job)
    for source, count in dict(meter.signals).items():
        page.add(catalog.JOB_SIGNALS, count, *job, source)
    page.add(catalog.JOB_USEFUL, meter.useful, *job)
    page.add(catalog.JOB_PAID, meter.paid, *job)
    page.add(catalog.JOB_SAMPLES, meter.samples, *job)
    if status is not None:
        job_metrics.progress(page, job, status)
        job_metrics.grid(page, job, None if state in IDLE_STATES else status, known.view.spec)
        job_metrics.slow(page, job, None if state in IDLE_STATES else status)
        job_metrics.history(page, job, status)
        _checkpoint(page, job, status.checkpoint, status_now.checkpoint)
    _cost(page, known, status_now)
    return state


def _key(known: OperatedJob) -> JobKey:
    return (known.view.namespace, known.view.name)


def _checkpoint(page: MetricsPage, job: JobKey, known: CheckpointSummary | None, newest: CheckpointStatus) -> None:
    """Add the step, interval and age of a job's newest checkpoint to the page. known: from the coordinator; None adds
    nothing. newest: from the job's current status, perhaps reported by an earlier coordinator.
    """
    if known is None:
        return
    at = newest.last_time
    age = known.age if known.age is not None else max(0.0, time.time() - at.timestamp()) if at else None
    step = known.first if newest.last_step is None else newest.last_step
    job_metrics.checkpoint(page, job, step=step, every_steps=known.every_steps, age=age)


def _workers(page: MetricsPage, job: JobKey, status_now: BambooJobStatus) -> None:
    page.add(catalog.JOB_DESIRED_WORKERS, status_now.workers.desired, *job)
    page.add(catalog.JOB_DESIRED_PIPELINES, status_now.pipelines.desired, *job)


def _rollout(page: MetricsPage, job: JobKey, rollout: RolloutRecord | None) -> None:
    """Add a rollout's metrics to the page, if the operator has a record of it."""
    if rollout is None:
        return
    page.add(catalog.JOB_UPDATED_WORKERS, rollout.updated, *job)
    for state in RolloutState:
        page.add(catalog.JOB_ROLLOUT_STATE, rollout.state == state, *job, state.value)


def _pods(page: MetricsPage, job: JobKey, known: OperatedJob, *, idle: bool) -> None:
    facts = known.facts
    capacities = {pool.name: pool.capacity.value for pool in facts.spec.node_pools} if facts.spec else {}
    paid = facts.pods if facts.paid is None else facts.paid
    for metric, counts in ((catalog.JOB_PODS, facts.pods), (catalog.JOB_PAID_PODS, paid)):
        for pool in capacities.keys() | counts.keys():
            page.add(metric, 0 if idle else counts.get(pool, 0), *job, pool, capacities.get(pool, ""))


def _cost(page: MetricsPage, known: OperatedJob, status_now: BambooJobStatus) -> None:
    """Add a job's costs, if a pool has, or had, a price.

    The counter shows the cost in the written status, from which the next operator continues, so that it never falls.
    """
    job, facts, view = _key(known), known.facts, known.view
    cost, written = status_now.cost, view.status.cost
    if cost.total is None:
        return
    total = float(facts.cost)
    if cost.per_hour is not None:
        page.add(catalog.JOB_COST_PER_HOUR, float(cost.per_hour), *job)
    page.add(catalog.JOB_COST, float(written.total or 0), *job)
    page.add(catalog.JOB_COST_SO_FAR, total, *job)
    live = view.live
    if live is not None and live.step and live.phase != "Recovering":
        samples = live.step * view.spec.training.global_batch_size - live.lost_samples
        if samples > 0:
            page.add(catalog.JOB_COST_PER_SAMPLES, total / samples * 1e6, *job)


def _operator(page: MetricsPage, sources: MetricSources) -> None:
    counts, calls = sources.counts, sources.calls
    page.add(catalog.OPERATOR_INFO, 1, version("bamboo-operator"))
    for result in ("ok", "failed"):
        page.add(catalog.OPERATOR_RECONCILES, counts.reconciles[result], result)
    page.add_histogram(catalog.OPERATOR_RECONCILE_DURATION, counts.reconcile_seconds)
    page.add_histogram(catalog.OPERATOR_TICK_DELAY, counts.tick_delay)
    for (verb, resource, code), count in dict(calls.requests).items():
        page.add(catalog.OPERATOR_API_REQUESTS, count, verb, resource, code)
    for (verb, resource), seconds in dict(calls.seconds).items():
        page.add_histogram(catalog.OPERATOR_API_DURATION, seconds, verb, resource)
    _table(page, catalog.OPERATOR_EVENTS, counts.events)
    _table(page, catalog.OPERATOR_WATCH_EVENTS, counts.watched)
    _table(page, catalog.OPERATOR_REFUSALS, sources.gateway.refusals)
    page.add(catalog.OPERATOR_CHANNELS, sources.gateway.connected)


def _table(page: MetricsPage, metric: Metric, counts: Counter[str]) -> None:
    for label, count in dict(counts).items():
        page.add(metric, count, label)
