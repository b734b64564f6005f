"""The candidates of a search: grids, redundancy, placement, standbys."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo.sizing.space import Limits, grids, redundancies, spreads, standbys
from bamboo.sizing.trials.candidate import Candidate, as_the_job_is
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.grid import make_layout
from job_simulation_kit import manifest
from sizing_kit import layered, world


def at(layers: int = 4, microbatches: int = 6, **more: Any) -> tuple[World, Candidate]:
    found = world(manifest(2, 1, microbatches, **more), layered(layers))
    return found, as_the_job_is("m", found.spec)


def shapes(found: tuple[World, Candidate], limits: Limits) -> set[tuple[int, int]]:
    return {(one.stages, one.pipelines) for one in grids(found[0], limits)}


def test_no_grid_is_larger_than_the_nodes_the_layers_or_the_microbatches_allow() -> None:
    found = at(layers=3, microbatches=4)
    small = Limits(nodes=5, micro_batches=(4,))
    assert shapes(found, small) == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)}
    assert (2, 2) not in shapes(found, replace(small, standby=(2,)))


def test_a_stage_has_a_layer_for_each_device() -> None:
    found = at(layers=7, worker={"devices": 2})
    assert {stages for stages, _ in shapes(found, Limits(nodes=8))} == {1, 2, 3}


def test_of_pipelines_that_are_as_fast_only_the_fewest_are_tried() -> None:
    """With 3, 4 or 5 pipelines the busiest one runs 2 of the 6 microbatches, so of these numbers only 3 is tried."""
    tried = {d for _, d in shapes(at(microbatches=6), Limits(nodes=8, stages=(1,), micro_batches=(4,)))}
    assert tried == {1, 2, 3, 6}
    largest = [max(map(len, make_layout(0, 6, count, 6).split)) for count in sorted(tried)]
    assert len(set(largest)) == len(largest)


def test_a_split_that_the_user_has_fixed_stays() -> None:
    found = at(topology={"stages": 2, "pipelines": 1, "split": [1, 3]})
    assert {stages for stages, _ in shapes(found, Limits(nodes=8))} == {2}


@pytest.mark.parametrize(
    ("topology", "elastic", "grids"),
    [
        ({}, {}, {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)}),
        ({}, {"minStages": 2}, {(2, 1), (2, 2), (3, 1), (4, 1)}),
        ({"stages": 2}, {}, {(2, 1), (2, 2)}),
        ({"pipelines": 2}, {}, {(1, 2), (2, 2)}),
    ],
)
def test_of_a_grid_that_is_chosen_those_are_tried_that_the_coordinator_may_choose(
    topology: dict[str, int], elastic: dict[str, int], grids: set[tuple[int, int]]
) -> None:
    found = at(elastic={"maxWorkers": 4, **elastic}, topology=topology)
    assert shapes(found, Limits(nodes=4, micro_batches=(4,))) == grids


def test_standbys_are_tried_as_far_as_there_are_nodes() -> None:
    found, like = at(standby={"workers": 1})
    one = replace(like, pipelines=2, stages=3)
    assert {way.standby for way in standbys(found, Limits(nodes=8), one)} == {0, 1, 2}
    assert {way.standby for way in standbys(found, Limits(nodes=8, standby=(2, 5)), one)} == {2}


def test_one_pipeline_is_in_one_zone_or_in_all() -> None:
    found, like = at()
    assert {way.spread for way in spreads(found, replace(like, pipelines=2))} == set(SpreadPolicy)
    assert SpreadPolicy.ZONE_PER_PIPELINE not in {way.spread for way in spreads(found, like)}


def test_fewer_replicas_are_tried_before_a_grid_is_too_large() -> None:
    like = replace(at()[1], mode=RedundancyMode.REPLICAS, replicas=2)
    assert [(one.mode.value, one.replicas) for one in redundancies(like)] == [
        ("Replicas", 2),
        ("Replicas", 1),
        ("None", 1),
    ]
    bare = replace(like, mode=RedundancyMode.NONE)
    assert list(redundancies(bare)) == [bare]
