"""The operator's metrics of a job, and its counts of refused workers."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from bamboo_core.control.server import Unauthorized, Unavailable
from bamboo_core.metrics import catalog
from bamboo_core.metrics.exposition import MetricsPage
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.status.facts import StatusFacts
from job_metrics_kit import POOLS, exposed, kept, look, values
from metrics_kit import check_page
from operator_kit import NOW, job, said


def test_the_operator_tells_the_age_that_the_status_knows() -> None:
    """A new coordinator knows of no checkpoint yet, so the checkpoint's step and age come from the job's status."""
    at = (datetime.now(UTC) - timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")
    page = MetricsPage()
    unknown = replace(kept(), step=None, age=None)
    written = {"checkpoint": {"lastStep": 40, "lastTime": at}}
    job_page(page, look(status=said(checkpoint=unknown), written=written), JobMeter(OperatorCounts()))
    assert values(page, catalog.JOB_CHECKPOINT_STEP) == {(): 40}
    assert 89 < values(page, catalog.JOB_CHECKPOINT_AGE)[()] < 3600


def test_the_operator_tells_a_jobs_state_pods_and_cost() -> None:
    page, meter = MetricsPage(), JobMeter(OperatorCounts())
    meter.useful, meter.paid, meter.committed, meter.samples = 30.0, 40.0, 1000.0, 48
    meter.signals["NodeDeleted"] += 1
    written = {"cost": {"total": "0.1"}}
    assert job_page(page, look(written=written), meter) == "Running"
    assert {state for state, value in values(page, catalog.JOB_STATE).items() if value} == {("Running",)}
    assert values(page, catalog.JOB_CONDITION)["FallbackActive",] == 1
    assert values(page, catalog.JOB_PODS) == {("spot", "Spot"): 2, ("sure", "OnDemand"): 1}
    assert values(page, catalog.JOB_PAID_PODS) == {("spot", "Spot"): 2, ("sure", "OnDemand"): 0}
    assert values(page, catalog.JOB_COST_PER_HOUR) == {(): 1.0}
    assert values(page, catalog.JOB_COST) == {(): 0.1}, "what its status says, where another operator would go on"
    assert values(page, catalog.JOB_COST_SO_FAR) == {(): 0.25}
    samples = 3 * 8
    assert values(page, catalog.JOB_SAMPLES) == {(): 48}
    assert values(page, catalog.JOB_COST_PER_SAMPLES) == {(): pytest.approx(0.25 / samples * 1e6)}
    assert values(page, catalog.JOB_SIGNALS) == {("NodeDeleted",): 1}
    assert values(page, catalog.JOB_PAID) == {(): 40.0}
    assert values(page, catalog.JOB_LAST_COMMIT) == {(): 1000.0}


def test_a_restarted_operator_keeps_silent_on_what_it_does_not_know() -> None:
    page = MetricsPage()
    job_page(page, look(status=said(phase="Recovering", step=0)), JobMeter(OperatorCounts()))
    for metric in (catalog.JOB_STEP, catalog.JOB_COST_PER_SAMPLES):
        assert values(page, metric) == {}


def test_a_suspended_job_has_no_workers_and_costs_nothing_now() -> None:
    spec = job(nodePools=POOLS, suspend=True)
    page = MetricsPage()
    facts = StatusFacts(now=NOW, generation=1, spec=spec, pods={"spot": 2}, cost=Decimal(1))
    assert job_page(page, look(facts=facts), JobMeter(OperatorCounts())) == "Suspended"
    assert set(values(page, catalog.JOB_WORKERS).values()) == {0}
    assert values(page, catalog.JOB_PODS)["spot", "Spot"] == 0
    assert values(page, catalog.JOB_COST_PER_HOUR) == {(): 0}


def test_a_job_that_is_being_deleted_is_terminating() -> None:
    page = MetricsPage()
    facts = StatusFacts(now=NOW, generation=1, spec=job(), deleted=True)
    state = job_page(page, look(facts=facts), JobMeter(OperatorCounts()))
    assert values(page, catalog.JOB_STATE)[(state,)] == 1


def test_a_job_that_cannot_be_read_is_told_all_the_same() -> None:
    page = MetricsPage()
    facts = StatusFacts(now=NOW, generation=1, spec=None, problems=("spec.task: is missing",))
    found = look(facts=facts, status=None)
    assert job_page(page, found, JobMeter(OperatorCounts())) == "Invalid"
    assert values(page, catalog.JOB_DESIRED_WORKERS) == {(): 0}
    check_page("bamboo_", exposed(page), complete=False)


async def test_who_is_sent_away_is_counted_by_reason() -> None:
    gateway, answers = (
        WorkerGateway(),
        iter([Unauthorized("no token", "NoToken"), Unavailable("later"), Unauthorized("no")]),
    )

    async def authenticate(request: object) -> str:
        raise next(answers)

    check: Any = gateway.counting_refusals(authenticate)
    for error in (Unauthorized, Unavailable, Unauthorized):
        with pytest.raises(error):
            await check(None)
    assert gateway.refusals == {"NoToken": 1, "NotChecked": 1, "Unauthorized": 1}
