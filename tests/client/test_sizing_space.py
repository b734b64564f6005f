"""Which plans there are to try: grids, and the ways to protect one."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo.sizing.space import Limits, combined, grids, protections, smaller
from bamboo.sizing.trials.candidate import PROTECTION, Candidate, as_the_job_is
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.grid import make_layout
from job_simulation_kit import manifest
from sizing_kit import layered, world

POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "1"},
    {"name": "sure", "capacity": "OnDemand", "pricePerHour": "3"},
]


def at(layers: int = 4, microbatches: int = 6, **more: Any) -> tuple[World, Candidate]:
    found = world(manifest(2, 1, microbatches, **more), layered(layers))
    return found, as_the_job_is("m", found.spec)


def shapes(found: tuple[World, Candidate], limits: Limits) -> set[tuple[int, int]]:
    return {(one.stages, one.pipelines) for one in grids(found[0], limits, found[1])}


def test_no_grid_is_larger_than_the_nodes_the_layers_or_the_microbatches_allow() -> None:
    found = at(layers=3, microbatches=4)
    small = Limits(nodes=5, micro_batches=(4,))
    assert shapes(found, small) == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)}
    waiting = found[0], replace(found[1], standby=1)
    assert shapes(waiting, small) == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)}
    two = replace(found[1], standby=2)
    assert {one.standby for one in grids(found[0], small, two) if one.stages * one.pipelines == 4} == {1}
    assert {one.standby for one in grids(found[0], small, two) if one.stages * one.pipelines == 2} == {2}
    assert (2, 2) not in shapes((found[0], two), replace(small, standby=(2,)))


def test_a_stage_has_a_layer_for_each_device() -> None:
    found = at(layers=7, worker={"devices": 2})
    assert {stages for stages, _ in shapes(found, Limits(nodes=8))} == {1, 2, 3}


def test_of_pipelines_that_are_as_fast_only_the_fewest_are_tried() -> None:
    """6 microbatches over 4 or 5 pipelines: one of them has 2, as one of 3 has."""
    tried = {d for _, d in shapes(at(microbatches=6), Limits(nodes=8, stages=(1,), micro_batches=(4,)))}
    assert tried == {1, 2, 3, 6}
    largest = [max(map(len, make_layout(0, 6, count, None).split)) for count in sorted(tried)]
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


def test_a_protection_changes_one_thing() -> None:
    found, like = at(nodePools=POOLS, checkpoint={"storage": "file:///x", "everySteps": 100})
    one = replace(like, pipelines=2, stages=3)
    ways = set(protections(found, Limits(nodes=9), one))
    changed = {name for way in ways for name in PROTECTION if getattr(way, name) != getattr(one, name)}
    assert changed == set(PROTECTION)
    for way in ways:
        differs = {name for name in Candidate.__slots__ if getattr(way, name) != getattr(one, name)}
        assert len(differs) <= 1 or differs == {"mode", "replicas"}
    assert {way.every_steps for way in ways} == {25, 100, 400}
    assert {way.replicas for way in ways} == {1, 2}, "one fewer than stages"
    assert {way.standby for way in ways} == {0, 1, 2}
    assert {way.on_demand for way in ways} == {None, 2, 3}


def test_what_has_no_sense_is_not_tried() -> None:
    found, like = at()
    ways = set(protections(found, Limits(nodes=2), like))
    assert RedundancyMode.NONE not in {way.mode for way in ways}, "with one pipeline a loss is the end"
    assert {way.standby for way in ways} == {0}, "there is no node for one more"
    assert {way.every_steps for way in ways} == {None}
    assert SpreadPolicy.ZONE_PER_PIPELINE not in {way.spread for way in ways}, "one pipeline, one zone"


def test_the_best_protections_of_several_are_put_together() -> None:
    _, base = at()
    both = combined(base, [replace(base, standby=2), replace(base, mode=RedundancyMode.NONE)])
    assert both == replace(base, standby=2, mode=RedundancyMode.NONE)
    assert combined(replace(base, on_demand=2), []).on_demand is None, "all of them, so no share is left"


def test_fewer_replicas_are_tried_before_a_grid_is_too_large() -> None:
    like = replace(at()[1], mode=RedundancyMode.REPLICAS, replicas=2)
    assert [(one.mode.value, one.replicas) for one in smaller(like)] == [
        ("Replicas", 2),
        ("Replicas", 1),
        ("None", 1),
    ]
    bare = replace(like, mode=RedundancyMode.NONE)
    assert list(smaller(bare)) == [bare]
