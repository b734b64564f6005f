"""Simulated jobs over zones: the nodes they take, and traffic that crosses zones."""

from typing import Any

import msgspec
import pytest

from bamboo.simulation.job.job_run import JobRun
from bamboo.simulation.job.node_supply import NodeSupply
from bamboo.traces.trace import Change, NodeChange, Trace, make_trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.placement_spec import Capacity, NodePool
from job_simulation_kit import HOUR, job, manifest, run

BOUNDARY = 10_000  # bytes


def over_zones(zones: str, *lost: str) -> Trace:
    """Return an hour's recording of nodes in these zones, a letter each. lost: nodes removed after half an hour."""
    first = [NodeChange(at=0.0, change=Change.ADD, node=f"n{i}", zone=zone) for i, zone in enumerate(zones)]
    gone = [NodeChange(at=HOUR / 2, change=Change.REMOVE, node=node, zone=zones[int(node[1:])]) for node in lost]
    return make_trace([*first, *gone], duration=HOUR)


def two_pipelines(policy: str, **more: Any) -> JobRun:
    one = job(2, 2, spread={"policy": policy}, **more)
    layers = tuple(msgspec.structs.replace(layer, boundary=BOUNDARY) for layer in one.profile.layers)
    return JobRun(
        spec=one.spec,
        manifest=one.manifest,
        profile=msgspec.structs.replace(one.profile, layers=layers),
        trace=one.trace,
    )


def chosen_grid(policy: str) -> JobRun:
    """Return a run whose coordinator chooses a grid of at least two stages and at most four workers."""
    return two_pipelines(policy, topology={}, elastic={"maxWorkers": 4, "minStages": 2})


def test_what_crosses_zones_is_counted_and_paid_for() -> None:
    """With Interleave a step sends 6 outputs, their 6 gradients, and 100 bytes for each of 4 replicas across zones."""
    found = {
        policy: run(two_pipelines(policy), over_zones("ababab"), price=2.0, zone_price=0.5).figures
        for policy in ("Interleave", "ZonePerPipeline", "SingleZone")
    }
    apart, row, single = found.values()
    assert apart.nodes == row.nodes == pytest.approx(4.0)
    assert single.nodes == pytest.approx(3.0), "a zone has three nodes"
    crossed = apart.steps * (2 * 6 * BOUNDARY + 4 * 100)
    assert apart.zone_gb_per_hour == pytest.approx(crossed / 1e9, rel=0.02)
    assert apart.zone_usd_per_hour == pytest.approx(2 * 0.5 * apart.zone_gb_per_hour)
    assert apart.usd_per_hour == pytest.approx(4 * 2.0 + apart.zone_usd_per_hour)
    assert 0 < row.zone_gb_per_hour < apart.zone_gb_per_hour / 100
    assert single.zone_gb_per_hour == single.zone_usd_per_hour == 0


def test_a_single_zone_job_moves_on_only_when_its_zone_has_nothing_left() -> None:
    spec = parse_manifest(manifest(3, 1, 6, spread={"policy": "SingleZone"}))
    supply = NodeSupply(make_trace(), spec, None)
    for name, zone in [("n0", "a"), ("n1", "b"), ("n2", "b"), ("n3", "a"), ("n4", "b")]:
        supply.came(name, zone)
    taken = [supply.take() for _ in range(4)]
    assert [node and node.name for node in taken] == ["n1", "n2", "n4", None], "b has the most"
    for name in ("n1", "n2", "n4"):
        supply.went(name)
    again = supply.take()
    assert again is not None
    assert again.zone == "a"


def test_a_pipeline_waits_for_its_zone_and_the_other_one_does_not() -> None:
    spec = parse_manifest(manifest(2, 2, 6, spread={"policy": "ZonePerPipeline"}))
    supply = NodeSupply(make_trace(), spec, None)
    for i, zone in enumerate("aaab"):
        supply.came(f"n{i}", zone)
    taken = [supply.take() for _ in range(4)]
    assert [node and (node.zone, node.group) for node in taken] == [("a", 0), ("b", 1), ("a", 0), None]
    supply.came("n9", "b")
    late = supply.take()
    assert late is not None
    assert (late.zone, late.group) == ("b", 1)


def test_with_a_chosen_grid_nodes_of_all_zones_are_taken_and_pipelines_are_packed() -> None:
    """If the coordinator chooses the number of pipelines, no worker is bound to the zone of a pipeline."""
    figures = {
        policy: run(chosen_grid(policy), over_zones("abab"), price=2.0, zone_price=0.5).figures
        for policy in ("Interleave", "ZonePerPipeline")
    }
    packed, mixed = figures["ZonePerPipeline"], figures["Interleave"]
    assert packed.nodes == mixed.nodes == pytest.approx(4, abs=0.1)
    assert 0 < packed.zone_gb_per_hour < 0.6 * mixed.zone_gb_per_hour


def test_nodes_on_demand_come_in_the_zone_that_the_policy_wants() -> None:
    document = manifest(
        2,
        1,
        6,
        spread={"policy": "SingleZone"},
        nodePools=[{"name": "s", "maxWorkers": 1}, {"name": "d", "capacity": "OnDemand", "afterSeconds": 60}],
    )
    trace = over_zones("ab")
    supply = NodeSupply(trace, parse_manifest(document), None)
    supply.came("n1", "b")
    assert supply.take() is not None
    node = supply.take_on_demand(100.0)
    assert node is not None
    assert isinstance(node.pool, NodePool)
    assert (node.pool.capacity, node.zone) == (Capacity.ON_DEMAND, "b")
