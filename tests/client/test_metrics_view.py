"""A local job's metrics, as they are served."""

import re
import socket
import urllib.request

import pytest

from bamboo.local.views.metrics_view import MetricsError, MetricsView, fill
from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import SlowWorker, WorkerState
from bamboo_core.job.spec import JobSpec
from bamboo_core.metrics import job_catalog
from bamboo_core.metrics.exposition import Exporter, MetricsPage
from job_metrics_kit import exposed, kept, values
from metrics_kit import check_page
from operator_kit import job, said, takeover

TAKEOVERS = tuple(takeover(notice=notice, reused=1) for notice in (True, False, False))


JOB = ("default", "tiny")


def test_a_local_job_tells_how_far_it_is_and_what_it_went_through() -> None:
    status = said(
        takeovers=TAKEOVERS,
        preemptions=3,
        notices=1,
        lost_samples=4,
        restarts=2,
        unprotected=("pipeline 0 stage 1",),
        workers=(("w0", WorkerState.TRAINING), ("w2", WorkerState.TRAINING), ("w3", WorkerState.STARTING)),
        memory=(("w0", Memory(peak=7, limit=9)), ("w2", Memory(peak=3, limit=9))),
        traffic=(("w0", Traffic(sync=8)), ("w2", Traffic(sync=4, control=1))),
        trained_samples=20,
        trained_without=4,
        checkpoint=kept(),
        metrics=(("accuracy", 0.5), ("nothing", None)),
        evaluations=((2, {"loss": 3.0}), (4, {"loss": 2.5, "accuracy": 0.5, "other": None})),
        slow=(SlowWorker(worker="w2", pipeline=0, stage=1, seconds=0.2, usual=0.1, told="w2 is slow"),),
    )
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
    assert values(page, job_catalog.RUN_WORKER_MEMORY) == {("w0",): 7, ("w2",): 3}
    assert values(page, job_catalog.JOB_STEP_SENT)["sync",] == 6
    assert values(page, job_catalog.RUN_WORKER_SENT)["w2", "control"] == 1
    text = exposed(page)
    assert (
        'bamboo_job_takeover_pause_seconds_bucket{job="tiny",le="0.1",namespace="default",notice="false"} 2.0' in text
    )
    sums = re.findall(r"^bamboo_job_takeover_phase_seconds_sum.*phase=\"(\w+)\"} (\S+)", text, re.MULTILINE)
    assert {phase: float(value) for phase, value in sums} == pytest.approx(
        {"decide": 0.003, "reform": 0.06, "recompute": 0.237}
    )


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
