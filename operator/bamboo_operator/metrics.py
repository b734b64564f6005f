"""The operator's metrics: read from living jobs when they are asked for, so that a job that is gone has none."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from bamboo.metrics import catalog as table
from bamboo.metrics import job_metrics
from bamboo.metrics.exposition import Metric, MetricsPage
from bamboo.metrics.job_metrics import JobKey
from bamboo_operator.conditions import job_status
from bamboo_operator.counts import Calls, Counts, Meter
from bamboo_operator.doors import Doors
from bamboo_operator.lifecycle import Life
from bamboo_operator.looks import Look

IDLE_STATES = ("Suspended", "Invalid", "Complete", "Failed")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where everything is. lives: those of the jobs that are followed."""

    lives: Callable[[], Collection[Life]]
    doors: Doors
    calls: Calls
    counts: Counts

    def fill(self, page: MetricsPage) -> None:
        """In any thread."""
        states = dict.fromkeys(table.STATES, 0)
        lives = self.lives()
        for life in lives:
            try:
                states[job_page(page, life.look(), life.meter)] += 1
            except Exception:  # one job's numbers must not cost all others theirs
                logger.exception("%s/%s: no metrics", *life.key)
        _operator(page, self)
        now = time.monotonic()
        page.add(table.OPERATOR_OLDEST_PASS, max((now - life.passed for life in lives), default=0.0))
        page.add(table.OPERATOR_QUEUED, sum(life.queued for life in lives))
        for state, count in states.items():
            page.add(table.OPERATOR_JOBS, count, state)


def job_page(page: MetricsPage, look: Look, meter: Meter) -> str:
    """Adds a job's; returns its state."""
    job, status = (look.namespace, look.name), look.status
    told = job_status(status, look.written, look.facts)
    state = str(told["state"])
    for name in table.STATES:
        page.add(table.JOB_STATE, name == state, *job, name)
    for condition in told["conditions"]:
        page.add(table.JOB_CONDITION, condition["status"] == "True", *job, condition["type"])
        if condition["type"] == "Protected":
            holds = condition["status"] == "True"
            job_metrics.protected(page, job, holds=holds, reason=condition["reason"])
    _workers(page, job, told)
    _pods(page, job, look, idle=state in IDLE_STATES)
    page.add(table.JOB_LAST_COMMIT, meter.committed, *job)
    for source, count in dict(meter.signals).items():
        page.add(table.JOB_SIGNALS, count, *job, source)
    page.add(table.JOB_USEFUL, meter.useful, *job)
    page.add(table.JOB_PAID, meter.paid, *job)
    page.add(table.JOB_SAMPLES, meter.samples, *job)
    if status is not None and look.spec is not None:
        job_metrics.progress(page, job, status)
        job_metrics.grid(page, job, None if state in IDLE_STATES else status)
        job_metrics.history(page, job, status)
    _cost(page, look, meter, told)
    return state


def _workers(page: MetricsPage, job: JobKey, told: Mapping[str, Any]) -> None:
    page.add(table.JOB_WANTED_WORKERS, told["workers"]["desired"], *job)
    page.add(table.JOB_WANTED_PIPELINES, told["pipelines"]["desired"], *job)
    page.add(table.JOB_DEGRADED_PIPELINES, told["pipelines"]["degraded"], *job)


def _pods(page: MetricsPage, job: JobKey, look: Look, *, idle: bool) -> None:
    facts = look.facts
    capacities = {pool.name: pool.capacity.value for pool in facts.spec.node_pools} if facts.spec else {}
    paid = facts.pods if facts.paid is None else facts.paid
    for metric, counts in ((table.JOB_PODS, facts.pods), (table.JOB_PAID_PODS, paid)):
        for pool in capacities.keys() | counts.keys():
            page.add(metric, 0 if idle else counts.get(pool, 0), *job, pool, capacities.get(pool, ""))


def _cost(page: MetricsPage, look: Look, meter: Meter, told: Mapping[str, Any]) -> None:
    """Only if a pool has a price."""
    job = (look.namespace, look.name)
    if (cost := told.get("cost")) is None:
        return
    total = float(look.facts.base.cost + look.facts.cost)
    page.add(table.JOB_COST_PER_HOUR, float(cost["perHour"]), *job)
    page.add(table.JOB_COST, meter.cost, *job)
    page.add(table.JOB_COST_SO_FAR, total, *job)
    if look.facts.comparison.since is not None:
        page.add(table.JOB_ON_DEMAND_COST, meter.on_demand, *job)
        page.add(table.JOB_SAVED, float(look.facts.comparison.saved), *job)
    status, spec = look.status, look.spec
    if status is not None and spec is not None and status.step and status.phase != "Recovering":
        samples = status.step * spec.training.global_batch_size - status.lost_samples
        if samples > 0:
            page.add(table.JOB_COST_PER_SAMPLES, total / samples * 1e6, *job)


def _operator(page: MetricsPage, sources: Sources) -> None:
    counts, calls = sources.counts, sources.calls
    page.add(table.OPERATOR_INFO, 1, version("bamboo-operator"))
    for result in ("ok", "failed"):
        page.add(table.OPERATOR_PASSES, counts.passes[result], result)
    page.add_histogram(table.OPERATOR_PASS_DURATION, counts.pass_seconds)
    page.add_histogram(table.OPERATOR_LAG, counts.lag)
    for (verb, resource, code), count in dict(calls.requests).items():
        page.add(table.OPERATOR_API_REQUESTS, count, verb, resource, code)
    for (verb, resource), seconds in dict(calls.seconds).items():
        page.add_histogram(table.OPERATOR_API_DURATION, seconds, verb, resource)
    _table(page, table.OPERATOR_EVENTS, counts.events)
    _table(page, table.OPERATOR_WATCH_EVENTS, counts.watched)
    _table(page, table.OPERATOR_REFUSALS, sources.doors.refusals)
    page.add(table.OPERATOR_CHANNELS, sources.doors.connected)


def _table(page: MetricsPage, metric: Metric, counts: Counter[str]) -> None:
    for label, count in dict(counts).items():
        page.add(metric, count, label)
