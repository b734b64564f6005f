"""What crosses zones in a step, and what it costs: by hand, for small grids."""

from collections.abc import Sequence

import msgspec
import pytest

from bamboo.simulation.job.zone_traffic import TrafficKind, ZoneTraffic, step_traffic, traffic_usd
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.plan import Assignment, Portion
from job_simulation_kit import manifest, plan_of, profile, spec

BOUNDARY, GRADIENTS = 64, 100  # bytes of a layer


def traffic(zones: Sequence[str], *, stages: int = 4, pipelines: int = 1) -> ZoneTraffic:
    """One layer a stage, 8 microbatches; w0, w1, ... in these zones."""
    plan, where = plan_of(spec(stages, pipelines, 8), stages), {f"w{i}": zone for i, zone in enumerate(zones)}
    workers = tuple(msgspec.structs.replace(peer, zone=where[peer.worker]) for peer in plan.workers)
    plan = msgspec.structs.replace(plan, workers=workers)
    return step_traffic(plan, plan.target, profile(stages, boundary=BOUNDARY), where)


def test_nothing_is_billed_in_one_zone() -> None:
    found = traffic("aaaa")
    assert found.billed == 0
    assert found.within == {
        TrafficKind.BOUNDARIES: 2 * 3 * 8 * BOUNDARY,
        TrafficKind.REDUCTION: 4 * 7 * GRADIENTS,  # sums of all groups but the last one, to the stage before
        TrafficKind.REPLICAS: 4 * GRADIENTS,
    }


def test_neighbours_in_different_zones_send_everything_across() -> None:
    found = traffic("abcd")
    assert found.within == {}
    assert found.between == {
        TrafficKind.BOUNDARIES: 2 * 3 * 8 * BOUNDARY,
        TrafficKind.REPLICAS: 4 * GRADIENTS,
    }


def test_no_gradient_goes_back_to_layers_before_the_first_trained_one() -> None:
    plan = plan_of(spec(4, 1, 8), 4)
    whole = profile(4, boundary=BOUNDARY)
    frozen = msgspec.structs.replace(whole.layers[0], gradients=0)
    partly = msgspec.structs.replace(whole, layers=(frozen, frozen, *whole.layers[2:]))
    found = step_traffic(plan, plan.target, partly, {f"w{i}": zone for i, zone in enumerate("abcd")})
    assert found.between[TrafficKind.BOUNDARIES] == (2 * 3 - 2) * 8 * BOUNDARY


def test_pipelines_in_a_zone_each_reduce_across_and_nothing_else() -> None:
    """With one sum for each pipeline: half of the gradients to the other one, and half of the result back to it."""
    found = traffic("aaaabbbb", pipelines=2)
    assert found.between == {TrafficKind.REDUCTION: 4 * 2 * GRADIENTS}
    assert set(found.within) == {TrafficKind.BOUNDARIES, TrafficKind.REDUCTION, TrafficKind.REPLICAS}


def test_the_parts_of_a_lost_pipeline_go_to_its_owner() -> None:
    plan = plan_of(spec(1, 3, 12), 1)
    shared = Assignment(
        owner="w1", portions=(Portion(worker="w1", first=0, end=1), Portion(worker="w2", first=1, end=2))
    )
    changed = msgspec.structs.replace(plan, pipelines=((shared,), *plan.pipelines[1:]))
    found = step_traffic(changed, changed.target, profile(1), {"w1": "a", "w2": "b"})
    calm = step_traffic(changed, changed.target, profile(1), {"w1": "a", "w2": "a"})
    parts = found.billed + sum(found.within.values())
    assert parts == sum(calm.within.values())
    assert found.between[TrafficKind.REDUCTION] > calm.between.get(TrafficKind.REDUCTION, 0)


def test_checkpoints_have_their_share_of_each_step_and_are_not_billed() -> None:
    plan = plan_of(parse_manifest(manifest(4, 1, 8)), 4)
    found = step_traffic(plan, plan.target, profile(4), dict.fromkeys(plan.worker_ids(), "a"), checkpoint_steps=10)
    assert found.within[TrafficKind.CHECKPOINTS] == 4 * 300 / 10
    assert found.billed == 0


def test_both_ends_pay_for_what_crosses() -> None:
    assert traffic_usd(5e9, 0.01) == pytest.approx(0.10)


def test_traffic_of_several_steps_adds_up() -> None:
    step = traffic("aabb")
    assert (step * 3).billed == 3 * step.billed
    assert (step + step * 2).between == (step * 3).between
