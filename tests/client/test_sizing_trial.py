"""Hours and USD of a whole job, extrapolated from simulated runs."""

import math

import msgspec
import pytest

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobRecord, JobResult
from bamboo.sizing.trials.candidate import as_the_job_is
from bamboo.sizing.trials.trial import outcome_of, simulate_trial
from bamboo_core.job.training_spec import TrainingSpec
from job_simulation_kit import HOUR, manifest
from sizing_kit import assessed, layered, world

TRAINING = TrainingSpec(steps=20_000, global_batch_size=4, micro_batch_size=2)


def half_of_it_settled(end: float = 10.0) -> JobResult:
    """Return a run of `end` hours: 1000 steps/h from 0.5 h, 500 from 5 h on. 8 nodes, then 6, cost 1 USD/h each."""
    record = JobRecord(samples=4, begun=HOUR / 2)
    record.paid(5 * HOUR, 8, 8.0)
    record.paid(end * HOUR, 6, 6.0)
    record.steps += [(HOUR / 2, 5 * HOUR, 4500), (5 * HOUR, end * HOUR, 500 * (end - 5))]
    return JobResult(figures=record.figures(end * HOUR), series=record.series(end * HOUR), outcome="cut", message="")


def test_the_rest_goes_on_as_after_the_nodes_have_settled() -> None:
    """The run does 7000 steps in 10 h; the remaining 13000 steps follow at 500 an hour."""
    found = outcome_of(half_of_it_settled(), "", TRAINING, 5.0)
    assert (found.hours, found.usd) == pytest.approx((10 + 26, 70 + 26 * 6))


@pytest.mark.parametrize("settled", [0.0, 9.97, 20.0])
def test_without_steps_after_that_the_whole_run_is_what_the_rest_is_like(settled: float) -> None:
    """The estimate extrapolates the whole run, 7000 steps in 9.5 h."""
    result = half_of_it_settled()
    found = outcome_of(result, "", TRAINING, settled)
    assert found.hours == pytest.approx(0.5 + 9.5 * 20 / 7)
    assert found.usd == pytest.approx(70 * (0.5 + 9.5 * 20 / 7) / 10)
    assert found.simulated == 10


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
        assert found.traffic_usd == 0


def test_what_95_of_100_runs_keep_is_above_the_mean_by_their_spread() -> None:
    one = assessed(1, (1.0, 8.0), (1.0, 12.0))
    assert (one.usd, one.mean("usd"), one.total("usd")) == (10.0, 10.0, 20.0)
    assert one.sure("usd") == pytest.approx(10 + 1.645 * math.sqrt(8))
    assert one.sure("hours") == 1.0
    assert assessed(1, (1.0, 8.0)).sure("usd") == 8.0, "of one run no spread is known"
    assert assessed(1, (1.0, 8.0), (math.inf, math.inf)).sure("usd") == math.inf


def test_without_a_price_nothing_can_be_weighed() -> None:
    bare = msgspec.structs.replace(layered(3), prices=None)
    at = world(manifest(2, 1, 6), bare)
    with pytest.raises(SimulationError, match="no price is known for m; say it in a file for --prices"):
        simulate_trial(at, as_the_job_is("m", at.spec))
