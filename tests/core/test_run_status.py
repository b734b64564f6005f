"""What a coordinator says of its job, as the status of a BambooJob says it."""

from dataclasses import replace
from datetime import timedelta

import pytest

from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.api_object import written
from bamboo_core.job.status import WorkerCounts
from bamboo_core.view.run_status import run_status
from operator_kit import NOW, at, checkpoints, said


def test_progress_is_said_at_a_time() -> None:
    found = run_status(said(), NOW + timedelta(seconds=1.9)).training
    assert written(found) == {
        "step": 3,
        "steps": 10,
        "samplesPerSecond": 16.0,
        "loss": 4.0,
        "etaSeconds": 4,
        "lastReportedTime": at(1),
    }


@pytest.mark.parametrize("number", [None, float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_said(number: float | None) -> None:
    status = said(loss=number, samples_per_second=number, eta_seconds=number, evaluations=((2, {"loss": None}),))
    found = run_status(status, NOW).training
    assert (found.loss, found.samples_per_second, found.eta_seconds) == (None, None, None)
    assert found.evaluation is not None
    assert found.evaluation.metrics == {}


def test_workers_and_checkpoints_are_counted() -> None:
    states = (*said().workers, ("w2", WorkerState.STANDBY), ("w3", WorkerState.STARTING))
    found = run_status(said(workers=states, checkpoint=checkpoints(step=2, age=5.0, restores=3, repeated=7)), NOW)
    assert found.workers == WorkerCounts(desired=2, ready=3)
    assert (found.restores, found.checkpoint.last_step) == (3, 2)
    assert found.checkpoint.last_time == NOW - timedelta(seconds=5)
    none = run_status(replace(said(), checkpoint=checkpoints(step=None)), NOW)
    assert written(none.checkpoint) == {}
