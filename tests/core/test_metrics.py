"""The table of metrics, pages made from it, and what a job's metrics say."""

import re
import socket
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from bamboo.control.memory import Memory
from bamboo.control.server import Unauthorized, Unavailable
from bamboo.coordinator.checkpoint_counts import AbandonReason, CheckpointCounts, RestoreCause, RestoreProblem
from bamboo.coordinator.events import CheckpointSummary, SlowWorker, Takeover, WorkerState
from bamboo.job.spec import JobSpec
from bamboo.local.views.metrics_view import MetricsError, MetricsView, fill
from bamboo.metrics import job_catalog, worker_catalog
from bamboo.metrics.every_metric import EVERY_METRIC
from bamboo.metrics.exposition import Exporter, Metric, MetricKind, MetricsPage, MetricsPageCollector
from bamboo.metrics.histogram import Histogram
from bamboo.metrics.job_metrics import useful_seconds
from bamboo_operator.auth.worker_gateway import WorkerGateway
from bamboo_operator.http.metrics import job_page
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.kube.api_calls import resource_of
from bamboo_operator.status.condition_rules import ConditionResult, displayed_state
from bamboo_operator.status.facts import StatusFacts
from bamboo_operator.status.job_view import JobView
from metrics_kit import check_page
from operator_kit import NOW, job, said
from prometheus_kit import promtool
from world import World

UNITS = {"seconds": ("_seconds", "_seconds_total"), "bytes": ("_bytes", "_bytes_total"), "samples": ("_samples_total",)}
TAKEOVERS = tuple(
    Takeover(
        epoch=2, victim="w1", worker="w0", pipeline=0, stage=1, step=7, notice=notice, decide_ms=1.0, reform_ms=20.0,
        recompute_ms=79.0, forwards=2, backwards=3, reused=1,
    )
    for notice in (True, False, False)
)  # fmt: skip
JOB = ("default", "tiny")
POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "0.50"},
    {"name": "sure", "capacity": "OnDemand", "pricePerHour": "2.00", "afterSeconds": 60},
]


def exposed(page: MetricsPage) -> str:
    registry = CollectorRegistry()
    registry.register(MetricsPageCollector(page._exporter, lambda new: new._families.update(page._families)))
    return generate_latest(registry).decode()


def values(page: MetricsPage, metric: Metric) -> dict[tuple[str, ...], float]:
    """By the metric's own labels; of a histogram its count."""
    name = f"{metric.name}_count" if metric.kind is MetricKind.HISTOGRAM else metric.name
    own = [label for label in metric.labels if label not in ("namespace", "job")]
    samples = [sample for family in page.families() for sample in family.samples if sample.name == name]
    return {tuple(sample.labels[label] for label in own): sample.value for sample in samples}


# The table


def test_names_follow_the_conventions_and_say_whose_they_are() -> None:
    names = [metric.name for metric in EVERY_METRIC]
    assert len(names) == len(set(names))
    for metric in EVERY_METRIC:
        assert re.fullmatch(r"bamboo_(operator|job|worker)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER), metric.name
        assert metric.name.endswith(UNITS.get(metric.unit, ("",))), metric.name
        assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith("."), metric.name
        assert metric.by
        ours = metric.labels[:2] == ("namespace", "job")
        assert ours is metric.name.startswith("bamboo_job_"), metric.name
        assert not {"le", "quantile", "instance", "pod"} & set(metric.labels), metric.name


def test_what_is_not_declared_cannot_be_exported() -> None:
    page = MetricsPage(Exporter.WORKER)
    with pytest.raises(AssertionError, match="not declared for worker"):
        page.add(job_catalog.JOB_STEP, 1, *JOB)
    with pytest.raises(AssertionError, match="has the labels"):
        page.add(worker_catalog.WORKER_STAGES, 1)
    with pytest.raises(AssertionError):
        page.add(worker_catalog.WORKER_STEP_DURATION, 1)
    with pytest.raises(AssertionError):
        page.add_histogram(worker_catalog.WORKER_STEP_DURATION, Histogram((1.0,)))


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.1, 90), min_size=1, unique=True).map(sorted))
def test_a_histogram_counts_every_value_once(observed: list[float], bounds: list[float]) -> None:
    found = Histogram(bounds, observed)
    assert [count for _, count in found.cumulative()] == [
        *(sum(value <= bound for value in observed) for bound in bounds),
        len(observed),
    ]
    assert found.total == pytest.approx(sum(observed))


@pytest.mark.parametrize("exporter", Exporter)
def test_promtool_has_nothing_against_the_table(exporter: Exporter) -> None:
    page = MetricsPage(exporter)
    for metric in EVERY_METRIC:
        if exporter in metric.by and metric.kind is MetricKind.HISTOGRAM:
            page.add_histogram(metric, metric.histogram([1.0]), *metric.labels)
        elif exporter in metric.by:
            page.add(metric, 1.0, *metric.labels)
    check_page(exporter, exposed(page), complete=True)
    assert promtool("check", "metrics", stdin=exposed(page)) == ""


# A job


def look(**more: object) -> JobView:
    spec = job(nodePools=POOLS)
    facts = StatusFacts(
        now=NOW,
        generation=1,
        spec=spec,
        pods={"spot": 2, "sure": 1},
        paid={"spot": 2},
        cost=Decimal("0.25"),
        repeated_cost=Decimal("0.05"),
    )
    known = {"namespace": "default", "name": "tiny", "spec": spec, "facts": facts, "status": said(), **more}
    return JobView(**known)  # type: ignore[arg-type]


def test_a_local_job_tells_how_far_it_is_and_what_it_went_through() -> None:
    status = said(
        takeovers=TAKEOVERS, preemptions=3, notices=1, lost_samples=4, restarts=2, unprotected=("pipeline 0 stage 1",),
        workers=(("w0", WorkerState.TRAINING), ("w2", WorkerState.TRAINING), ("w3", WorkerState.STARTING)),
        memory=(("w0", Memory(log=7)), ("w2", Memory(parameters=3))), most_memory=("w1", Memory(log=9)),
        trained_samples=20, trained_without=4, checkpoint=kept(), metrics=(("accuracy", 0.5), ("nothing", None)),
        evaluations=((2, {"loss": 3.0}), (4, {"loss": 2.5, "accuracy": 0.5, "other": None})),
        slow=(SlowWorker(worker="w2", pipeline=0, stage=1, seconds=0.2, usual=0.1, told="w2 is slow"),),
    )  # fmt: skip
    page, spec = MetricsPage(Exporter.RUN), job()
    fill(page, JOB, status, spec)
    check_page(Exporter.RUN, exposed(page), complete=True)
    assert values(page, job_catalog.JOB_SAMPLES) == {(): 20}
    assert values(page, job_catalog.JOB_EVALUATION) == {("loss",): 2.5, ("accuracy",): 0.5}
    assert values(page, job_catalog.JOB_EVALUATED_STEP) == {(): 4}
    assert values(page, job_catalog.JOB_METRIC) == {("accuracy",): 0.5}
    assert values(page, job_catalog.JOB_PREEMPTIONS) == {("true",): 1, ("false",): 2}
    assert values(page, job_catalog.JOB_TAKEOVER_PAUSE) == {("true",): 1, ("false",): 2}
    assert values(page, job_catalog.JOB_TAKEOVER_PHASE) == {("decide",): 3, ("reform",): 3, ("recompute",): 3}
    assert values(page, job_catalog.JOB_TAKEOVER_PASSES) == {("forward",): 6, ("backward",): 9, ("reused",): 3}
    assert values(page, job_catalog.JOB_WORKERS)["training",] == 2
    assert values(page, job_catalog.JOB_READY_WORKERS) == {(): 2}
    assert values(page, job_catalog.JOB_UNPROTECTED_STAGES) == {(): 1}
    assert values(page, job_catalog.JOB_STRAGGLERS) == {(): 1}
    assert values(page, job_catalog.JOB_STRAGGLER_SECONDS) == {("w2", "own"): 0.2, ("w2", "usual"): 0.1}
    assert values(page, job_catalog.JOB_LARGEST_MEMORY)["log",] == 9
    assert values(page, job_catalog.RUN_WORKER_MEMORY)["w2", "parameters"] == 3
    text = exposed(page)
    assert (
        'bamboo_job_takeover_pause_seconds_bucket{job="tiny",le="0.1",namespace="default",notice="false"} 2.0' in text
    )
    sums = re.findall(r"^bamboo_job_takeover_phase_seconds_sum.*phase=\"(\w+)\"} (\S+)", text, re.MULTILINE)
    assert {phase: float(value) for phase, value in sums} == pytest.approx(
        {"decide": 0.003, "reform": 0.06, "recompute": 0.237}
    )


def kept() -> CheckpointSummary:
    counts = CheckpointCounts().saved(2.0, 0.004).saved(40.0, 0.03).abandoning(AbandonReason.STORE_FAILED)
    counts = counts.restoring(RestoreCause.WORKERS_GONE).unusable(RestoreProblem.DAMAGED).repeating(12, 0.5)
    return CheckpointSummary(
        step=8, age=30.0, seconds=40.0, bytes=100, every_steps=4, counts=replace(counts, bytes=250)
    )


def test_what_became_of_checkpoints_is_told() -> None:
    page = MetricsPage(Exporter.RUN)
    fill(page, JOB, said(checkpoint=kept()), job())
    told = {
        job_catalog.JOB_CHECKPOINT_STEP: {(): 8},
        job_catalog.JOB_CHECKPOINT_EVERY: {(): 4},
        job_catalog.JOB_CHECKPOINT_AGE: {(): 30.0},
        job_catalog.JOB_CHECKPOINT_DURATION: {(): 2},
        job_catalog.JOB_CHECKPOINT_STALL: {(): 2},
        job_catalog.JOB_CHECKPOINT_BYTES: {(): 250},
        job_catalog.JOB_REPEATED_STEPS: {(): 12},
        job_catalog.JOB_REPEATED_SECONDS: {(): 6.0},
        job_catalog.JOB_RESTORES: {("StageLost",): 0, ("WorkersGone",): 1},
        job_catalog.JOB_RESTORE_PROBLEMS: {("Damaged",): 1, ("Unreadable",): 0},
    }
    assert {metric: values(page, metric) for metric in told} == told
    abandoned = values(page, job_catalog.JOB_CHECKPOINTS_ABANDONED)
    assert abandoned == {(reason.value,): reason is AbandonReason.STORE_FAILED for reason in AbandonReason}
    text = exposed(page)
    assert 'bamboo_job_checkpoint_duration_seconds_sum{job="tiny",namespace="default"} 42.0' in text
    assert 'bamboo_job_checkpoint_stall_seconds_bucket{job="tiny",le="0.005",namespace="default"} 1.0' in text
    without = MetricsPage(Exporter.RUN)
    fill(without, JOB, said(), job())
    assert not [family.name for family in without.families() if "checkpoint" in family.name]


def test_the_operator_tells_the_age_that_the_status_knows() -> None:
    """Also if its coordinator is a new one that knows of no checkpoint."""
    at = (datetime.now(UTC) - timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")
    page = MetricsPage(Exporter.OPERATOR)
    unknown = replace(kept(), step=None, age=None)
    written = {"checkpoint": {"lastStep": 40, "lastTime": at}}
    job_page(page, look(status=said(checkpoint=unknown), written=written), JobMeter(OperatorCounts()))
    assert values(page, job_catalog.JOB_CHECKPOINT_STEP) == {(): 40}
    assert 89 < values(page, job_catalog.JOB_CHECKPOINT_AGE)[()] < 3600


def test_how_far_a_rollout_is_told_as_in_the_status() -> None:
    page = MetricsPage(Exporter.OPERATOR)
    written = {"rollout": {"revision": "a", "state": "Stalled", "updated": 1, "total": 2}}
    job_page(page, look(written=written), JobMeter(OperatorCounts()))
    assert values(page, job_catalog.JOB_UPDATED_WORKERS) == {(): 1}
    told = values(page, job_catalog.JOB_ROLLOUT_STATE)
    assert told == {("Complete",): 0, ("Progressing",): 0, ("Paused",): 0, ("Stalled",): 1}
    unknown = MetricsPage(Exporter.OPERATOR)
    job_page(unknown, look(written={}), JobMeter(OperatorCounts()))
    assert not [family.name for family in unknown.families() if "rollout" in family.name and family.samples]


def test_the_states_are_those_of_the_status() -> None:
    names = ("Failed", "Complete", "Accepted", "Suspended", "Restoring", "Degraded", "Running")
    shown = {
        displayed_state({name: ConditionResult(holds, reason, "") for name, holds in zip(names, flags, strict=True)})
        for flags in product((True, False), repeat=len(names))
        for reason in ("Training", "Saving")
    }
    assert shown == set(job_catalog.STATES)


def test_a_job_without_redundancy_is_not_called_protected() -> None:
    page = MetricsPage(Exporter.RUN)
    bare = said(grid=((("w0", False), ("w1", True)),), unprotected=("pipeline 0 stage 0",))
    fill(page, JOB, bare, job(redundancy={"mode": "None"}))
    assert values(page, job_catalog.JOB_UNPROTECTED_STAGES) == {(): 1}
    assert values(page, job_catalog.JOB_PROTECTED) == {("RedundancyOff",): 0}


def test_the_operator_tells_a_jobs_state_pods_and_cost() -> None:
    page, meter = MetricsPage(Exporter.OPERATOR), JobMeter(OperatorCounts())
    meter.useful, meter.paid, meter.committed, meter.cost, meter.samples = 30.0, 40.0, 1000.0, 0.1, 48
    meter.signals["NodeDeleted"] += 1
    meter.repeated = 0.02
    assert job_page(page, look(), meter) == "Running"
    assert {state for state, value in values(page, job_catalog.JOB_STATE).items() if value} == {("Running",)}
    assert values(page, job_catalog.JOB_CONDITION)["FallbackActive",] == 1
    assert values(page, job_catalog.JOB_PODS) == {("spot", "Spot"): 2, ("sure", "OnDemand"): 1}
    assert values(page, job_catalog.JOB_PAID_PODS) == {("spot", "Spot"): 2, ("sure", "OnDemand"): 0}
    assert values(page, job_catalog.JOB_COST_PER_HOUR) == {(): 1.0}
    assert values(page, job_catalog.JOB_COST) == {(): 0.1}, "what this operator has seen of it"
    assert values(page, job_catalog.JOB_COST_SO_FAR) == {(): 0.25}
    assert values(page, job_catalog.JOB_REPEATED_COST) == {(): 0.02}
    assert values(page, job_catalog.JOB_REPEATED_COST_SO_FAR) == {(): 0.05}
    samples = 3 * 8
    assert values(page, job_catalog.JOB_SAMPLES) == {(): 48}
    assert values(page, job_catalog.JOB_COST_PER_SAMPLES) == {(): pytest.approx(0.25 / samples * 1e6)}
    assert values(page, job_catalog.JOB_SIGNALS) == {("NodeDeleted",): 1}
    assert values(page, job_catalog.JOB_PAID) == {(): 40.0}
    assert values(page, job_catalog.JOB_LAST_COMMIT) == {(): 1000.0}


def test_a_restarted_operator_keeps_silent_on_what_it_does_not_know() -> None:
    page = MetricsPage(Exporter.OPERATOR)
    job_page(page, look(status=said(phase="Recovering", step=0)), JobMeter(OperatorCounts()))
    for metric in (job_catalog.JOB_STEP, job_catalog.JOB_COST_PER_SAMPLES):
        assert values(page, metric) == {}


def test_a_suspended_job_has_no_workers_and_costs_nothing_now() -> None:
    spec = job(nodePools=POOLS, suspend=True)
    page = MetricsPage(Exporter.OPERATOR)
    facts = StatusFacts(now=NOW, generation=1, spec=spec, pods={"spot": 2}, cost=Decimal(1))
    assert job_page(page, look(spec=spec, facts=facts), JobMeter(OperatorCounts())) == "Suspended"
    assert set(values(page, job_catalog.JOB_WORKERS).values()) == {0}
    assert values(page, job_catalog.JOB_PODS)["spot", "Spot"] == 0
    assert values(page, job_catalog.JOB_COST_PER_HOUR) == {(): 0}


def test_a_job_that_cannot_be_read_is_told_all_the_same() -> None:
    page = MetricsPage(Exporter.OPERATOR)
    facts = StatusFacts(now=NOW, generation=1, spec=None, problems=("spec.task: is missing",))
    found = JobView(namespace="default", name="bad", spec=None, facts=facts)
    assert job_page(page, found, JobMeter(OperatorCounts())) == "Invalid"
    assert values(page, job_catalog.JOB_DESIRED_WORKERS) == {(): 0}
    check_page(Exporter.OPERATOR, exposed(page), complete=False)


# Goodput


def test_steps_are_worth_their_usual_duration_for_each_owner() -> None:
    world = World(stages=2, pipelines=2, standby=1)
    world.settle()
    steps = (0.1,) * 30
    before = replace(world.state, trained=30, step_seconds=steps)

    def worth(seconds: float, count: int = 1) -> float:
        return useful_seconds(before, replace(before, trained=30 + count, step_seconds=(*steps, seconds)))

    assert worth(0.08) == pytest.approx(0.08 * 4)
    assert worth(5.0) == pytest.approx(0.1 * 4)  # the rest was a pause
    assert useful_seconds(before, before) == 0
    assert useful_seconds(before, replace(before, trained=31)) == 0  # nobody said how long it took
    first = replace(before, trained=0, step_seconds=())
    assert useful_seconds(first, replace(first, trained=1, step_seconds=(0.2,))) == pytest.approx(0.2 * 4)
    assert useful_seconds(replace(before, plan=None), replace(before, plan=None, trained=31, step_seconds=(0.1,))) == 0


# Serving


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsError, match=f"--metrics-port {port}: Address already in use"):
            MetricsView(job(), port).start(lambda wish: None)


def test_metrics_of_a_run_are_served_from_start_to_stop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spec: JobSpec = job()
    view = MetricsView(spec, port)
    view.start(lambda wish: None)
    view.status(said())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert 'bamboo_job_step{job="tiny",namespace="default"} 3.0' in text
    check_page(Exporter.RUN, text, complete=False)
    view.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


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


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/a/pods", "pods"),
        ("/api/v1/namespaces/a/pods/x-w1", "pods"),
        ("/api/v1/namespaces/namespaces/pods/pods", "pods"),
        ("/apis/bamboo.dev/v1alpha1/namespaces/a/bamboojobs/x/status", "bamboojobs/status"),
        ("/apis/authentication.k8s.io/v1/tokenreviews", "tokenreviews"),
        ("/apis/networking.k8s.io/v1/namespaces/a/networkpolicies", "networkpolicies"),
    ],
)
def test_calls_are_told_apart_by_resource_and_not_by_name(path: str, resource: str) -> None:
    assert resource_of(path) == resource
