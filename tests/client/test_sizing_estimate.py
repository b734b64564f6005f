"""Estimates of candidates without a simulation."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo.sizing.estimate import Estimate, estimate, least_seconds, step_seconds, traffic_of_step
from bamboo.sizing.trials.candidate import Candidate, as_the_job_is
from bamboo.sizing.trials.world import World
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancyMode
from job_simulation_kit import manifest
from sizing_kit import layered, world

POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "1"},
    {"name": "sure", "capacity": "OnDemand", "pricePerHour": "3"},
]


def grid(at: World, stages: int, pipelines: int, **fields: Any) -> Candidate:
    return replace(as_the_job_is("m", at.spec), stages=stages, pipelines=pipelines, **fields)


def estimated(at: World, one: Candidate) -> Estimate:
    return estimate(at, one, 1.0, 0.0)


def test_no_step_is_shorter_than_its_bound() -> None:
    at = world(manifest(2, 1, 6), layered(4))
    for stages, pipelines in ((1, 1), (2, 1), (4, 1), (2, 3)):
        one = grid(at, stages, pipelines)
        assert 0 < least_seconds(at, one) <= step_seconds(at, one) * (1 + 1e-9)


def test_only_neighbours_in_other_zones_pay_for_traffic() -> None:
    at = world(manifest(2, 1, 6), layered(4))
    assert traffic_of_step(at, grid(at, 2, 1, spread=SpreadPolicy.SINGLE_ZONE)) == 0
    assert traffic_of_step(at, grid(at, 2, 1, spread=SpreadPolicy.INTERLEAVE)) > 0


def test_standbys_make_up_for_missing_nodes_and_cost_money() -> None:
    at = world(manifest(2, 1, 6), layered(4), rate=0.3)
    bare, spare = (estimated(at, grid(at, 4, 1, standby=count)) for count in (0, 2))
    assert bare.hours > spare.hours > at.steps / 3600
    assert spare.usd / spare.hours > bare.usd / bare.hours


def test_without_replicas_a_missing_node_stops_its_pipeline() -> None:
    at = world(manifest(2, 1, 6), layered(4), rate=0.3)
    kept, none = (estimated(at, grid(at, 4, 2, mode=mode)) for mode in (RedundancyMode.REPLICAS, RedundancyMode.NONE))
    assert none.hours > kept.hours


def test_a_grid_that_is_chosen_follows_the_nodes() -> None:
    fixed = world(manifest(2, 1, 6), layered(8), rate=0.3)
    chosen = world(manifest(None, None, 6, elastic={"maxWorkers": 8}), layered(8), rate=0.3)
    assert estimated(chosen, grid(chosen, 8, 1)).hours < estimated(fixed, grid(fixed, 8, 1)).hours


def test_nodes_on_demand_replace_missing_ones_at_their_price() -> None:
    spot = world(manifest(2, 1, 6), layered(4), rate=0.3)
    both = world(manifest(2, 1, 6, nodePools=POOLS), layered(4), rate=0.3)
    one, other = estimated(spot, grid(spot, 4, 1)), estimated(both, grid(both, 4, 1))
    assert other.hours < one.hours
    assert other.usd / other.hours == pytest.approx(4 * (1.0 * 0.75 + 3.0 * 0.25), rel=0.05)
