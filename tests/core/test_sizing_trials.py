"""What a plan comes to by the runs that were simulated of it."""

import math
from dataclasses import replace

import msgspec
import pytest
from test_step_times import manifest

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobFigures
from bamboo.sizing.candidate import as_the_job_is
from bamboo.sizing.trials import PlanTrial, outcome_of, simulate_trial, simulate_trials
from bamboo.sizing.world import Market
from job_simulation_kit import HOUR, nodes
from sizing_kit import assessed, layered, world

FIGURES = JobFigures(
    preemptions=3, takeovers=2, restores=1, fatal=0, repeated=4, pause=0.1, nodes=4.0, throughput=8.0,
    usd_per_hour=2.0, usd=3.0, zone_gb_per_hour=1.0, zone_usd_per_hour=0.02, value=4.0, goodput=0.9, waited=0.0,
    begun=0.5, hours=1.5, steps=100,
)  # fmt: skip


def test_a_run_that_is_cut_counts_its_start_once_and_the_rest_in_proportion() -> None:
    found = outcome_of(FIGURES, "", 1000)
    assert found.hours == pytest.approx(0.5 + 1.0 * 10)
    assert found.usd == pytest.approx(3.0 * 10.5 / 1.5)
    assert found.traffic_usd == pytest.approx(0.02 * 10.5)
    assert found.simulated == 1.5


@pytest.mark.parametrize(("figures", "ended"), [(FIGURES, "all copies were lost"), (replace(FIGURES, steps=0), "")])
def test_a_run_without_an_end_takes_for_ever(figures: JobFigures, ended: str) -> None:
    found = outcome_of(figures, ended, 1000)
    assert (found.hours, found.usd, found.traffic_usd) == (math.inf, math.inf, 0.0)
    assert found.failed == ended


def test_what_95_of_100_runs_keep_is_above_the_mean_by_their_spread() -> None:
    one = assessed(1, (1.0, 8.0), (1.0, 12.0))
    assert (one.usd, one.mean("usd"), one.total("usd")) == (10.0, 10.0, 20.0)
    assert one.sure("usd") == pytest.approx(10 + 1.645 * math.sqrt(8))
    assert one.sure("hours") == 1.0
    assert assessed(1, (1.0, 8.0)).sure("usd") == 8.0, "of one run no spread is known"
    assert assessed(1, (1.0, 8.0), (math.inf, math.inf)).sure("usd") == math.inf


def test_candidates_that_the_rules_forbid_have_no_runs_and_others_are_in_their_order() -> None:
    at = world(manifest(2, 1, 6), layered(3))
    good = as_the_job_is("m", at.spec)
    trials = [PlanTrial(candidate=c, seeds=(1,), seconds=60.0) for c in (good, replace(good, micro_batch=5), good)]
    done: list[int] = []
    found = simulate_trials(at, trials, 1, done.append)
    assert [one is None for one in found] == [False, True, False]
    assert found[0] == found[2] == simulate_trial(at, trials[0])
    assert done == [1, 1, 1]


def test_a_short_run_that_never_began_is_taken_from_another_place_of_the_recording() -> None:
    """Nodes are there in its second half only, where the second seed begins."""
    recorded = nodes(0, *((1800.0, "add", f"n{i}") for i in range(4)), duration=HOUR)
    at = replace(world(manifest(2, 1, 6), layered(3)), market=Market(recording=recorded))
    one = as_the_job_is("m", at.spec)

    def hours(*, short: bool) -> list[float]:
        trials = [PlanTrial(candidate=one, seeds=(seed,), seconds=700.0, short=short) for seed in (1, 2)]
        return [found.hours for found in (simulate_trial(at, trial) for trial in trials) if found]

    plain, other = hours(short=False), hours(short=True)
    assert plain[0] == math.inf > plain[1]
    assert other[0] < math.inf
    assert other[1] == plain[1]


def test_without_a_price_nothing_can_be_weighed() -> None:
    bare = msgspec.structs.replace(layered(3), prices=None)
    at = world(manifest(2, 1, 6), bare)
    with pytest.raises(SimulationError, match="no price is known for m; say it in a file for --prices"):
        simulate_trial(at, PlanTrial(candidate=as_the_job_is("m", at.spec), seeds=(1,), seconds=60.0))
