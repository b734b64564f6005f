"""Plans for workers with several devices: each device gets layers, and the rest of the plan stays unchanged."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.placement_spec import WorkerSpec
from bamboo_core.job.spec import JobSpec, RedundancySpec, TopologySpec, TrainingSpec
from bamboo_core.planning.grid import initial_plan, layer_ranges, split_layers
from bamboo_core.planning.heirs import heirs_may_differ
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_misfits, plan_problems
from bamboo_core.planning.splits.device_stages import (
    device_layers,
    devices_of,
    expanded,
    folded,
)
from bamboo_core.planning.splits.resplit_plans import balanced
from bamboo_core.planning.splits.speeds import WorkEstimate, step_seconds
from manifest_kit import bamboojob, gpt_task
from replica_kit import after_loss

COSTS = st.lists(st.integers(1, 100).map(float), min_size=12, max_size=24)
MICROBATCHES = 8


def job(stages: int, devices: int, pipelines: int = 1) -> JobSpec:
    training = {"steps": 1, "globalBatchSize": MICROBATCHES, "microBatchSize": 1}
    spec = parse_manifest(
        bamboojob(task=gpt_task(), training=training, topology={"stages": stages, "pipelines": pipelines})
    )
    return replace(spec, worker=WorkerSpec(devices=devices))


def planned(costs: list[float], stages: int, pipelines: int, replicas: int, devices: int, per_node: int = 1) -> Plan:
    count = stages * pipelines
    peers = [
        Peer(worker=f"w{i}", host="h", port=1, zone="ab"[i % 2], node=f"n{i // per_node}" if per_node > 1 else "")
        for i in range(count)
    ]
    spec = job(stages, devices, pipelines)
    ranges = layer_ranges(costs, TopologySpec(stages=stages), devices=devices)
    training = TrainingSpec(steps=1, global_batch_size=MICROBATCHES, micro_batch_size=1)
    plan = initial_plan(peers, ranges, pipelines, training, RedundancySpec(replicas=replicas))
    return msgspec.structs.replace(plan, device_layers=device_layers(spec, ranges, costs))


@st.composite
def plans(draw: st.DrawFn, most: int = 3) -> Plan:
    """Draw a plan of up to four stages and three pipelines, often after losses. most: the most devices per worker."""
    stages, pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    plan = planned(
        draw(COSTS),
        stages,
        pipelines,
        draw(st.integers(1, 3)),
        draw(st.integers(1, most)),
        per_node=draw(st.integers(1, 2)),
    )
    dead = draw(st.sets(st.sampled_from([peer.worker for peer in plan.workers]), max_size=2))
    after = after_loss(plan, dead) if dead else None
    return after if isinstance(after, Plan) else plan


@settings(max_examples=150, deadline=None)
@given(plans())
def test_a_sound_plan_is_expanded_to_a_sound_one_and_folded_to_itself(plan: Plan) -> None:
    assert plan_problems(plan) == []
    several, devices = expanded(plan), devices_of(plan)
    assert plan_problems(several) == []
    assert folded(several, devices) == plan
    assert len(several.stages) == len(plan.stages) * devices
    assert {end for _, end in plan.stages} <= {end for _, end in several.stages}
    for cell in several.cells():
        assert several.at(cell) == plan.at(Cell(cell.pipeline, cell.stage // devices))
    assert heirs_may_differ(several) == heirs_may_differ(plan)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 4), st.integers(2, 3))
def test_the_busiest_device_has_as_little_to_do_as_whole_layers_allow(
    costs: list[float], stages: int, devices: int
) -> None:
    ranges = layer_ranges(costs, TopologySpec(stages=stages), devices=devices)
    each = device_layers(job(stages, devices), ranges, costs)

    def worst(of: tuple[tuple[int, int], ...]) -> float:
        return max(sum(costs[a:b]) for a, b in of)

    assert worst(each) == worst(split_layers(costs, stages * devices))
    assert all(sum(first <= a < end for a, _ in each) == devices for first, end in ranges)


def test_a_heavy_layer_leaves_a_stage_a_layer_for_each_device() -> None:
    costs = [100.0, 1, 1, 1, 1]
    assert layer_ranges(costs, TopologySpec(stages=2)) == ((0, 1), (1, 5))
    assert layer_ranges(costs, TopologySpec(stages=2), devices=2) == ((0, 2), (2, 5))


def test_layers_are_balanced_over_the_devices_of_slow_workers() -> None:
    """A worker that is three times slower gets a third as many layers as the other, but at least one per device."""
    spec, plan = job(2, 2), planned([1.0] * 16, 2, 1, 1, 2)
    work = WorkEstimate((1.0,) * 16, {plan.at(Cell(0, 1)).owner: 3.0})
    assert balanced(plan, spec, work) == ((0, 12), (12, 16))
    few = planned([1.0] * 5, 2, 1, 1, 2)
    work = WorkEstimate((1.0,) * 5, {few.at(Cell(0, 1)).owner: 30.0})
    assert balanced(few, spec, work) == ((0, 3), (3, 5)), "a layer for each device"


def test_a_step_is_as_long_as_its_busiest_device() -> None:
    assert step_seconds([[4, 8]], [5], devices=4) == 12 + 4 * 2


@pytest.mark.parametrize("changes", [{"device_layers": ()}, {"device_layers": ((0, 3), (3, 7), (7, 8), (8, 12))}])
def test_a_plan_that_does_not_fit_the_jobs_devices_is_none_of_it(changes: dict[str, object]) -> None:
    spec, plan = job(2, 2), planned([1.0] * 12, 2, 1, 1, 2)
    assert plan_misfits(plan, spec) == []
    assert plan_misfits(msgspec.structs.replace(plan, stages=((0, 6), (6, 12)), **changes), spec) != []
    assert plan_misfits(plan, replace(spec, worker=WorkerSpec())) != []


def test_a_lost_pipeline_of_one_stage_on_several_devices_has_one_heir() -> None:
    after = after_loss(planned([1.0] * 12, 1, 3, 1, 2), {"w1"})
    assert isinstance(after, Plan)
    assert plan_problems(after) == []
    assert after.at(Cell(1, 0)).portions == ()
    assert after_loss(planned([1.0] * 12, 1, 3, 1, 1), {"w1"}).at(Cell(1, 0)).portions
