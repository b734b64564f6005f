"""Spread policies that keep pipelines in a zone: at the start, at replacements, and when a job grows."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.manifest_warnings import warnings
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import RedundancySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.desired import PlanningView, owners_of_new_rows
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Cell, Peer, Plan, plan_problems
from bamboo_core.planning.transitions import improve, takeover
from job_simulation_kit import manifest

PER_PIPELINE, SINGLE = SpreadPolicy.ZONE_PER_PIPELINE, SpreadPolicy.SINGLE_ZONE
TRAINING = TrainingSpec(steps=1, global_batch_size=8, micro_batch_size=1)


def peers(zones: str) -> list[Peer]:
    return [Peer(worker=f"w{i}", host="h", port=1, zone=zone) for i, zone in enumerate(zones)]


def planned(zones: str, stages: int, pipelines: int, spread: SpreadPolicy) -> Plan:
    layers = tuple((s, s + 1) for s in range(stages))
    plan = initial_plan(peers(zones), layers, pipelines, TRAINING, RedundancySpec(), spread=spread)
    assert plan_problems(plan) == []
    return plan


def zones_of(plan: Plan) -> list[str]:
    """Return the zones of each pipeline's owners, in the order of stages."""
    zone = {peer.worker: peer.zone for peer in plan.workers}
    return ["".join(zone[assignment.owner] for assignment in row) for row in plan.pipelines]


@pytest.mark.parametrize(
    ("zones", "spread", "expected"),
    [
        ("abababab", PER_PIPELINE, ["aaaa", "bbbb"]),
        ("ababababbbbb", PER_PIPELINE, ["aaaa", "bbbb"]),  # not both in b, which would have room for them
        ("ababababbbbb", SINGLE, ["bbbb", "bbbb"]),
        ("bbbbbbbba", PER_PIPELINE, ["bbbb", "bbbb"]),
        ("abcabcab", PER_PIPELINE, ["aaab", "bbcc"]),  # as few neighbours in different zones as may be
        ("abababab", SINGLE, ["aaaa", "bbbb"]),
    ],
)
def test_pipelines_begin_in_zones(zones: str, spread: SpreadPolicy, expected: list[str]) -> None:
    assert zones_of(planned(zones, 4, 2, spread)) == expected


@given(st.text("abc", min_size=12, max_size=16), st.sampled_from([PER_PIPELINE, SINGLE]))
def test_everybody_is_somewhere_once(zones: str, spread: SpreadPolicy) -> None:
    plan = planned(zones, 4, 3, spread)
    owners = [plan.at(cell).owner for cell in plan.cells()]
    assert len(set(owners)) == len(owners) == 12


def view(plan: Plan, live: list[Peer], spread: SpreadPolicy, pipelines: int = 2) -> PlanningView:
    """Return a planning view with all replicas in sync."""
    return PlanningView(
        plan=plan,
        live={p.worker: p for p in live},
        leaving={},
        synced=frozenset((c, w) for c in plan.cells() for w in plan.at(c).replicas),
        redundancy=RedundancySpec().on(1),
        pipelines=pipelines,
        generation=0,
        spread=spread,
    )


def test_a_pipeline_is_healed_by_a_worker_of_its_zone() -> None:
    """After the loss of w7 in zone b, w9, which joins in b, replaces it; w8, which joins in a, does not."""
    plan = planned("abababab", 4, 2, PER_PIPELINE)
    left = [p for p in plan.workers if p.worker != "w7"]
    after = takeover(view(plan, left, PER_PIPELINE))
    assert isinstance(after, Plan)
    new = [Peer(worker="w8", host="h", port=1, zone="a"), Peer(worker="w9", host="h", port=1, zone="b")]
    healing = improve(view(after, [*left, *new], PER_PIPELINE))
    assert healing is not None
    assert {w for c in healing.cells() for w in healing.at(c).replicas} >= {"w9"}
    assert "w8" not in healing.holders()


def test_a_job_grows_by_a_pipeline_in_one_zone() -> None:
    plan = planned("aaaa", 4, 1, PER_PIPELINE)
    new = [Peer(worker=f"n{i}", host="h", port=1, zone=zone) for i, zone in enumerate("abcbcabbc")]
    newcomers = owners_of_new_rows(view(plan, [*plan.workers, *new], PER_PIPELINE))
    zone = {p.worker: p.zone for p in new}
    assert Counter(zone[worker] for worker in newcomers.values()) == {"b": 4}
    filling = improve(view(plan, [*plan.workers, *new], PER_PIPELINE))
    assert filling is not None
    late = Peer(worker="late", host="h", port=1, zone="c")  # c has as many as b now: that changes nothing any more
    again = owners_of_new_rows(view(filling, [*plan.workers, *new, late], PER_PIPELINE))
    assert again == newcomers


@pytest.mark.parametrize(
    ("policy", "pipelines", "told"),
    [
        ("SingleZone", 2, "spec.spread.policy SingleZone without spec.checkpoint: the job ends"),
        ("ZonePerPipeline", 1, "spec.spread.policy ZonePerPipeline with one pipeline"),
        ("ZonePerPipeline", 2, ""),
        ("Interleave", 2, ""),
    ],
)
def test_what_the_loss_of_a_zone_ends_is_warned_of(policy: str, pipelines: int, told: str) -> None:
    found = [
        line
        for line in warnings(parse_manifest(manifest(2, pipelines, 8, spread={"policy": policy})))
        if "spread" in line
    ]
    assert [line.startswith(told) for line in found] == [True] * bool(told)


def test_a_zone_that_is_lost_leaves_a_whole_pipeline() -> None:
    plan = planned("abababab", 4, 2, PER_PIPELINE)
    after = takeover(view(plan, [p for p in plan.workers if p.zone == "a"], PER_PIPELINE))
    assert isinstance(after, Plan)
    survivors = {p.worker for p in plan.workers if p.zone == "a"}
    assert all(after.at(Cell(d, s)).owner in survivors for d in range(2) for s in range(4))
    assert msgspec.json.decode(msgspec.json.encode(after), type=Plan) == after
