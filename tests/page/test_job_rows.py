"""The list of jobs: what a line says, and which lines come first."""

import random
from dataclasses import replace

import pytest

from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.status import TrainingProgress, WorkerCounts, read_status
from bamboo_core.page import document as d
from bamboo_core.page.job_rows import by_attention, job_row
from bamboo_core.view.job_view import JobView
from manifest_kit import training
from operator_kit import job, said, viewed
from page_kit import written

COST = d.PageCost(total=12.5, per_hour=3.0)
GRID = ((("tiny-w0", True), ("tiny-w1", True)),)
WORKERS = (("tiny-w0", WorkerState.TRAINING), ("tiny-w1", WorkerState.TRAINING))


def view(state: str, **live: object) -> JobView:
    status = read_status(
        written(
            state,
            training={"step": 40, "steps": 100, "loss": 2.5, "samplesPerSecond": 64.0, "etaSeconds": 60},
            workers={"ready": 3, "desired": 4},
            preemptions=7,
        )
    )
    assert (status.training.step, status.workers) == (40, WorkerCounts(desired=4, ready=3))
    return viewed(job(training=training(100, 8, 2)), status, said(**live) if live else None)


def test_what_the_coordinator_says_counts_before_the_status() -> None:
    live = {"grid": GRID, "workers": WORKERS, "step": 41, "loss": 2.25, "samples_per_second": 32.0, "preemptions": 1}
    row = job_row(view("Running", **live), COST)
    assert (row.namespace, row.name, row.state.name) == ("default", "tiny", "Running")
    assert (row.step, row.loss, row.samples_per_second) == (41, 2.25, 32.0)
    assert (row.workers, row.workers_wanted, row.preemptions) == (3, 4, 7)
    assert (row.cost, row.cost_per_hour) == (12.5, 3.0)


@pytest.mark.parametrize("recovering", [False, True])
def test_without_a_coordinator_that_knows_the_job_its_status_is_shown(recovering: bool) -> None:
    live = replace(said(phase="Recovering", step=0), grid=()) if recovering else None
    row = job_row(replace(view("Running"), live=live), None)
    assert (row.step, row.steps, row.loss, row.samples_per_second, row.eta_seconds) == (40, 100, 2.5, 64.0, 60.0)
    assert (row.cost, row.cost_per_hour) == (None, None)


def test_a_job_that_is_over_has_no_speed() -> None:
    row = job_row(view("Complete"), None)
    assert (row.step, row.samples_per_second, row.eta_seconds, row.state.over) == (40, None, None, True)
    bare = job_row(viewed(job(training=training(100, 8, 2))), None)
    assert (bare.step, bare.steps, bare.state.name) == (TrainingProgress().step, 100, "Pending")


def test_what_asks_for_attention_comes_first() -> None:
    states = ["Invalid", "Degraded", "Failed", "Pending", "Running", "Suspended", "Complete"]
    rows = [job_row(view(state), None) for state in states]
    shuffled = list(rows)
    random.Random(3).shuffle(shuffled)
    assert [row.state.name for row in by_attention(shuffled)] == states


def test_among_equals_the_newest_comes_first() -> None:
    state = d.PageState(name="Running", tone="good", sentence="")
    made = {"a": 1.0, "b": 3.0, "c": None, "d": 3.0}
    rows = [
        d.JobRow(namespace="n", name=name, state=state, workers=1, workers_wanted=1, preemptions=0, made=at)
        for name, at in made.items()
    ]
    assert [row.name for row in by_attention(rows)] == ["b", "d", "a", "c"]
