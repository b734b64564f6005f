"""`bamboo plan`: the candidates that are simulated, and the result of the search."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bamboo.simulation.job.job_run import model_of, simulate_job
from bamboo.sizing.choice import Bounds
from bamboo.sizing.estimate import memory_needed
from bamboo.sizing.search import MOST_SIMULATED, SearchResult, Shortlist, search, shortlist
from bamboo.sizing.space import Limits, grids
from bamboo.sizing.trials.candidate import edited, edits, job_of
from bamboo.sizing.trials.world import World
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest
from sizing_kit import layered, world


def listed(at: World, limits: Limits, bounds: Bounds | None = None) -> Shortlist:
    return shortlist(at, limits, bounds or Bounds())


def test_a_grid_that_fits_only_in_another_mode_is_no_grid_that_does_not_fit() -> None:
    document = manifest(2, 1, 6, redundancy={"mode": "Replicas"})
    limits, roomy = Limits(nodes=4, stages=(4,), pipelines=(1,), micro_batches=(4,)), world(document, layered(4))
    double = next(grids(roomy, limits))
    bare = replace(double, mode=RedundancyMode.NONE)
    between = (memory_needed(roomy, double) + memory_needed(roomy, bare)) // 2
    assert memory_needed(roomy, bare) < between < memory_needed(roomy, double)
    tight = listed(world(document, layered(4, memory=between), rate=0.0), limits)
    assert {one.candidate.mode for one in tight.candidates} == {RedundancyMode.NONE}
    assert tight.too_large == 0


def test_what_does_not_fit_into_memory_is_left_out_and_why_is_said() -> None:
    document = manifest(2, 1, 8)
    found = listed(world(document, layered(8, memory=2500)), Limits(nodes=8))
    assert found.too_large > 0
    assert min(one.candidate.stages for one in found.estimated) > 1
    with pytest.raises(
        ValueError, match=r"none of \d+ grids fits in any redundancy mode: they need more memory than the machine has"
    ):
        listed(world(document, layered(8, memory=200)), Limits(nodes=8))


def test_the_global_batch_is_the_same_in_all_candidates() -> None:
    at = world(manifest(2, 2, 8), layered(4))
    for one in grids(at, Limits(nodes=16)):
        made = job_of(one, at.spec, at.document)
        if made is not None:
            training = made[0].training
            assert training.micro_batch_size * training.microbatches == at.spec.training.global_batch_size
            assert (made[0].topology.stages, made[0].topology.pipelines) == (one.stages, one.pipelines)


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(budget=1.0), Bounds(deadline=0.1)])
def test_a_dozen_is_simulated_with_the_best_estimate_and_the_ends_of_the_front(bounds: Bounds) -> None:
    found = listed(world(manifest(2, 1, 24), layered(8)), Limits(nodes=8), bounds)
    assert len(set(found.candidates)) == len(found.candidates) == MOST_SIMULATED
    best = min(found.estimated, key=lambda one: bounds.rank(*one.point))
    assert bounds.rank(*best.point) == bounds.rank(*found.candidates[0].point)
    for end in range(2):
        least = min(one.point[end] for one in found.estimated)
        assert min(one.point[end] for one in found.candidates) == least


@pytest.fixture(scope="module")
def small() -> tuple[World, SearchResult]:
    document = manifest(2, 1, 6)
    document["spec"]["training"]["steps"] = 2000
    document["spec"]["checkpoint"] = {"storage": "file:///tmp/x", "everySteps": 100}
    at, done = world(document, layered(3)), list[int]()
    found = search(at, Limits(nodes=4, micro_batches=(4,)), Bounds(), jobs=1, done=done.append)
    assert sum(done) == found.runs == 2 * len(found.shortlist.candidates)
    assert all(one.hours < other.hours and one.usd > other.usd for one, other in pairwise(found.front))
    assert found.chosen in found.front
    return at, found


def test_what_is_promised_is_what_the_manifest_simulates_to(small: tuple[World, SearchResult]) -> None:
    at, chosen = small[0], small[1].chosen
    assert chosen is not None
    document = edited(at.document, edits(chosen.candidate, at.spec))
    run = replace(at, hours=24.0).run(chosen.candidate, 1)
    assert (run.spec, run.manifest) == (parse_manifest(document), document)
    result = simulate_job(run, model=model_of(run))
    assert result.outcome == "Complete"
    assert result.figures.hours == pytest.approx(chosen.hours, rel=0.25)
    assert result.figures.usd == pytest.approx(chosen.usd, rel=0.25)
