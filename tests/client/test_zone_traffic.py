"""The bytes of a step that cross zones, computed by hand for small grids."""

import msgspec
import pytest

from bamboo.simulation.job.zone_traffic import (
    TrafficKind,
    Transfer,
    crossing,
    step_traffic,
    step_transfers,
)
from bamboo_core.planning.plan import Assignment, Plan, Portion
from bamboo_core.planning.profile import ModelProfile
from job_simulation_kit import plan_of, profile, spec

BOUNDARY, GRADIENTS = 64, 100  # bytes of a layer


def placed(plan: Plan, zones: str) -> Plan:
    """Return the plan with w0, w1, ... in these zones, a letter each."""
    where = {f"w{i}": zone for i, zone in enumerate(zones)}
    workers = tuple(msgspec.structs.replace(peer, zone=where[peer.worker]) for peer in plan.workers)
    return msgspec.structs.replace(plan, workers=workers)


def layers(stages: int) -> ModelProfile:
    return profile(stages, boundary=BOUNDARY)


@pytest.mark.parametrize(
    ("zones", "pipelines", "crosses"),
    [
        ("aaaa", 1, 0),
        ("abcd", 1, 2 * 3 * 8 * BOUNDARY + 4 * GRADIENTS),  # outputs and their gradients; replicas
        # With one sum for each pipeline: half of the gradients to the other one, and half of the result back to it.
        ("aaaabbbb", 2, 4 * 2 * GRADIENTS),
    ],
)
def test_a_step_of_one_layer_a_stage_sends_this_across(zones: str, pipelines: int, crosses: float) -> None:
    plan = placed(plan_of(spec(4, pipelines, 8), 4), zones)
    assert step_traffic(plan, plan.target, layers(4)) == crosses


def test_no_gradient_goes_back_to_layers_before_the_first_trained_one() -> None:
    plan, whole = placed(plan_of(spec(4, 1, 8), 4), "abcd"), layers(4)
    frozen = msgspec.structs.replace(whole.layers[0], gradients=0)
    partly = msgspec.structs.replace(whole, layers=(frozen, frozen, *whole.layers[2:]))
    trained = 2 * GRADIENTS  # to replicas
    assert step_traffic(plan, plan.target, partly) == (2 * 3 - 2) * 8 * BOUNDARY + trained


def test_the_parts_of_a_lost_pipeline_go_to_its_owner() -> None:
    plan = plan_of(spec(1, 3, 12), 1)
    shared = Assignment(
        owner="w1", portions=(Portion(worker="w1", first=0, end=1), Portion(worker="w2", first=1, end=2))
    )
    changed = msgspec.structs.replace(plan, pipelines=((shared,), *plan.pipelines[1:]))
    ways = {(one.sender, one.receiver) for one in step_transfers(changed, changed.target, profile(1))}
    assert ("w2", "w1") in ways


def test_transfers_to_several_workers_of_a_zone_count_for_each() -> None:
    transfers = [Transfer(TrafficKind.STATES, "w0", "w1", 5.0, 3), Transfer(TrafficKind.STATES, "w1", "w2", 7.0)]
    assert crossing(transfers, {"w0": "a", "w1": "b", "w2": "b"}) == 15.0
