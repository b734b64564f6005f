"""`bamboo plan`: what is left out before anything is simulated, and what the whole search promises."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.simulation.job.job_run import model_of, simulate_job
from bamboo.sizing.calm import memory_needed
from bamboo.sizing.choice import Bounds, choose
from bamboo.sizing.pareto import Point, dominates, front
from bamboo.sizing.search import Counts, fitting_grids, near, search
from bamboo.sizing.space import Limits, grids
from bamboo.sizing.trials.candidate import Candidate, as_the_job_is, edited, edits, job_of
from bamboo.sizing.trials.trial import Assessment, CandidateTrial, simulate_trial
from bamboo.sizing.trials.world import World
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.profile import Network
from job_simulation_kit import manifest
from sizing_kit import POINTS, assessed, layered, world


@given(POINTS, st.floats(0.01, 0.3), st.randoms(use_true_random=False))
def test_short_runs_that_are_wrong_by_less_than_half_the_slack_drop_nothing_of_the_true_front(
    points: list[Point], slack: float, rng: Any
) -> None:
    """However the short runs of two plans are wrong: the one that is on the true front goes on to the next round."""
    most = math.sqrt(1 + slack) - 1e-9
    wrong = [assessed(i + 1, tuple(v * most ** rng.uniform(-1, 1) for v in p)) for i, p in enumerate(points)]
    left = {one.candidate.stages - 1 for one in near(wrong, slack, len(points))}
    true = {i for i, p in enumerate(points) if not any(dominates(other, p) for other in points)}
    assert true <= left


def test_a_grid_that_fits_only_in_another_mode_is_no_grid_that_does_not_fit() -> None:
    document = manifest(2, 1, 6, redundancy={"mode": "Replicas"})
    limits, roomy = Limits(nodes=4, stages=(4,), pipelines=(1,), micro_batches=(4,)), world(document, layered(4))
    double = next(grids(roomy, limits, as_the_job_is("m", roomy.spec)))
    bare = replace(double, mode=RedundancyMode.NONE)
    between = (memory_needed(roomy, double) + memory_needed(roomy, bare)) // 2
    assert memory_needed(roomy, bare) < between < memory_needed(roomy, double)
    tight = world(document, layered(4, memory=between))
    kept = fitting_grids(tight, limits, as_the_job_is("m", tight.spec), Counts())
    assert {one.mode for one, _ in kept} == {RedundancyMode.NONE}


def test_a_smaller_grid_with_more_on_standby_is_tried_in_the_place_of_the_best() -> None:
    """Short runs do not show that nodes are scarce."""
    at = world(manifest(2, 1, 12), layered(4))
    limits = Limits(nodes=4, pipelines=(1,), micro_batches=(4,))

    def simulate(_: str, trials: Sequence[CandidateTrial]) -> list[Assessment | None]:
        return [
            replace(assessed(1, (hours, hours)), candidate=trial.candidate)
            for trial in trials
            if (hours := 1 / trial.candidate.stages if trial.short or trial.candidate.standby else 9.0)
        ]

    found = search(at, limits, as_the_job_is("m", at.spec), simulate, partial(choose, bounds=Bounds()))
    assert found.chosen is not None
    assert (found.chosen.candidate.stages, found.chosen.candidate.standby) == (3, 1)


def exhaustive(at: World, limits: Limits, like: Candidate) -> dict[Candidate, Assessment]:
    """Every grid that fits, simulated, as the search would do it last."""
    found = {}
    for one in grids(at, limits, like):
        if job_of(one, at.spec, at.document) is not None:
            assessment = simulate_trial(at, CandidateTrial(candidate=one, seeds=(1, 2), seconds=400.0))
            assert assessment is not None
            found[one] = assessment
    return found


@pytest.mark.parametrize(("layers", "microbatches", "rate"), [(4, 8, 0.0), (3, 6, 0.9), (4, 12, 0.5)])
def test_no_grid_of_the_true_front_is_left_out_for_its_undisturbed_step(
    layers: int, microbatches: int, rate: float
) -> None:
    document = manifest(2, 1, microbatches, spread={"policy": "Interleave"})
    network = Network(flow=1e8, machine=2e8, latency=0.0005)
    at = world(document, msgspec.structs.replace(layered(layers), network=network), rate=rate)
    limits, like = Limits(nodes=8, micro_batches=(4,)), as_the_job_is("m", at.spec)
    counts = Counts()
    kept = {one for one, _ in fitting_grids(at, limits, like, counts)}
    true = front(list(exhaustive(at, limits, like).values()), lambda one: one.point)
    assert counts.slow > 0
    assert {one.candidate for one in true} <= kept


def test_what_does_not_fit_into_memory_is_left_out_and_why_is_said() -> None:
    document = manifest(2, 1, 8)
    counts, at = Counts(), world(document, layered(8, memory=2500))
    kept = fitting_grids(at, Limits(nodes=8), as_the_job_is("m", at.spec), counts)
    assert counts.too_large > 0
    assert min(one.stages for one, _ in kept) > 1
    small = world(document, layered(8, memory=200))
    with pytest.raises(
        ValueError,
        match=r"none of \d+ grids fits in any redundancy mode: .* need more memory than the machine has, at least",
    ):
        fitting_grids(small, Limits(nodes=8), as_the_job_is("m", small.spec), Counts())


def test_the_global_batch_is_the_same_in_all_candidates() -> None:
    at = world(manifest(2, 2, 8), layered(4))
    for one in grids(at, Limits(nodes=16), as_the_job_is("m", at.spec)):
        made = job_of(one, at.spec, at.document)
        if made is not None:
            training = made[0].training
            assert training.micro_batch_size * training.microbatches == at.spec.training.global_batch_size
            assert (made[0].topology.stages, made[0].topology.pipelines) == (one.stages, one.pipelines)


def searched(at: World, limits: Limits, bounds: Bounds | None = None) -> Any:
    def simulate(about: str, trials: Sequence[CandidateTrial]) -> list[Assessment | None]:
        return [simulate_trial(at, trial) for trial in trials]

    like = as_the_job_is("m", at.spec)
    return search(at, limits, like, simulate, partial(choose, bounds=bounds or Bounds()))


@pytest.fixture(scope="module")
def small() -> tuple[World, Any]:
    document = manifest(2, 1, 6)
    document["spec"]["training"]["steps"] = 2000
    document["spec"]["checkpoint"] = {"storage": "file:///tmp/x", "everySteps": 100}
    at = world(document, layered(3))
    return at, searched(at, Limits(nodes=4, micro_batches=(4,)))


def test_the_front_ascends_in_time_and_descends_in_cost(small: tuple[World, Any]) -> None:
    found = small[1].front
    assert len(found) >= 2
    assert all(one.hours < other.hours and one.usd > other.usd for one, other in pairwise(found))
    assert all(len(one.outcomes) == 2 for one in found)
    assert small[1].chosen in found


def test_what_is_promised_is_what_the_manifest_simulates_to(small: tuple[World, Any]) -> None:
    at, found = small
    chosen = found.chosen
    document = edited(at.document, edits(chosen.candidate, at.spec, at.document))
    run = at.run(chosen.candidate, 1, 24 * 3600.0)
    assert run is not None
    assert (run.spec, run.manifest) == (parse_manifest(document), document)
    result = simulate_job(run, model=model_of(run))
    assert result.outcome == "Complete"
    assert result.figures.hours == pytest.approx(chosen.hours, rel=0.25)
    assert result.figures.usd == pytest.approx(chosen.usd, rel=0.25)
