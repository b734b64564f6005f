"""What a run that was cut says of the whole job."""

import math

import pytest

from bamboo.job.spec import TrainingSpec
from bamboo.simulation.job.job_record import JobRecord, JobResult
from bamboo.sizing.trials import outcome_of

HOUR = 3600.0
TRAINING = TrainingSpec(steps=20_000, global_batch_size=4, micro_batch_size=2)


def half_of_it_settled(end: float = 10.0) -> JobResult:
    """Half an hour until it begins, then 1000 steps an hour on 8 nodes; from 5 h on 500 on 6, at 1 USD each."""
    record = JobRecord(samples=4, begun=HOUR / 2)
    record.paid(5 * HOUR, 8, 8.0)
    record.paid(end * HOUR, 6, 6.0)
    record.steps += [(HOUR / 2, 5 * HOUR, 4500), (5 * HOUR, end * HOUR, 500 * (end - 5))]
    return JobResult(figures=record.figures(end * HOUR), series=record.series(end * HOUR), outcome="cut", message="")


def test_the_rest_goes_on_as_after_the_nodes_have_settled() -> None:
    """7000 steps in 10 h, and 13000 at 500 an hour."""
    found = outcome_of(half_of_it_settled(), "", TRAINING, 5.0)
    assert (found.hours, found.usd) == pytest.approx((10 + 26, 70 + 26 * 6))


@pytest.mark.parametrize("settled", [0.0, 9.97, 20.0])
def test_without_steps_after_that_the_whole_run_is_what_the_rest_is_like(settled: float) -> None:
    """7000 steps in 9.5 h."""
    found = outcome_of(half_of_it_settled(), "", TRAINING, settled)
    assert found.hours == pytest.approx(10 + 13_000 * 9.5 / 7000)


def test_what_has_ended_by_itself_has_taken_what_it_took() -> None:
    whole = TrainingSpec(steps=7000, global_batch_size=4, micro_batch_size=2)
    found = outcome_of(half_of_it_settled(), "", whole, 5.0)
    assert (found.hours, found.usd) == pytest.approx((10, 70))


def test_what_failed_or_never_trained_has_no_end() -> None:
    never = JobResult(
        figures=JobRecord(samples=4).figures(HOUR), series=JobRecord(samples=4).series(HOUR), outcome="cut", message=""
    )
    for found in (outcome_of(never, "", TRAINING, 5.0), outcome_of(half_of_it_settled(), "it failed", TRAINING, 5.0)):
        assert math.isinf(found.hours)
        assert math.isinf(found.usd)
