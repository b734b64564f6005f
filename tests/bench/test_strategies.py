"""Bamboo and all strategies under the same traces: properties of their results, and refused comparisons."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo.profiles.files import read_profile, shipped_names
from bamboo.simulation.figures import SimulationError
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, Trace, make_trace
from bamboo_core.job.manifest import parse_manifest
from strategies.choose import ON_DEMAND, SPOT, Aim, Workplace, on_demand_speed, region_of, strategy_result, zone_choices
from strategies.comparison import OURS, STRATEGIES, ComparedJob, CoordinatorRuns, compared, published_job
from strategies.costs import Costs
from strategies.drive import drive
from strategies.policy import Saving
from strategies.restarting import Restarting
from strategies.timeline import timeline
from strategy_kit import costs_of, profile


@pytest.fixture(scope="module")
def job() -> ComparedJob:
    return published_job(read_profile("vgg-v100"))


def made(job: ComparedJob, rate: float, seed: int = 1, hours: float = 8.0) -> Any:
    return generate(Generation(nodes=job.place.nodes, hours=hours, removal=rate, addition=0.5), seed)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one == OURS else one for one in STRATEGIES]
)
def test_without_preemptions_all_lose_only_their_start(job: ComparedJob, name: str) -> None:
    found = compared(name, job, made(job, 0.0, hours=2.0 if name == OURS else 8.0))
    assert found.goodput > 0.98
    assert (found.redone, found.preemptions) == (0, 0)


def test_on_demand_nodes_are_at_least_as_fast_as_published(job: ComparedJob) -> None:
    """The on-demand job chooses the fastest grid, perhaps not the published one, and pays for all of its nodes."""
    published = job.profile.published
    assert published is not None
    found = compared(ON_DEMAND, job, made(job, 0.3))
    assert found.throughput == pytest.approx(on_demand_speed(job.place))
    assert found.throughput >= 0.999 * published.batch / published.on_demand_seconds
    assert found.usd_per_hour == pytest.approx(3.06 * job.place.on_demand_nodes)


def test_bamboos_figures_are_the_coordinators(job: ComparedJob) -> None:
    """Throughput is 90 to 100 % of its bound: the fastest grid at every moment, without pauses. The times add up."""
    trace = made(job, 0.3, hours=2.0)
    runs = CoordinatorRuns(job, trace)
    found = runs.best(Aim.THROUGHPUT)
    assert 0.9 * runs.bound(Aim.THROUGHPUT) < found.throughput <= runs.bound(Aim.THROUGHPUT)
    spent = found.productive + found.redone + found.stalled + found.idle
    assert spent == pytest.approx(found.duration)
    assert (found.preemptions, found.redone) == (sum(c.change is Change.REMOVE for c in trace.changes), 0)
    assert found.usd == pytest.approx(0.91 * found.node_seconds / 3600)


@pytest.mark.parametrize("name", ["checkpoint", pytest.param(OURS, marks=pytest.mark.slow)])
def test_what_is_chosen_by_value_is_not_dearer_and_as_fast_as_on_demand_nodes(job: ComparedJob, name: str) -> None:
    trace = made(job, 0.1, hours=2.0)
    fast, cheap = (compared(name, job, trace, objective=one) for one in Aim)
    assert cheap.value >= fast.value
    assert cheap.throughput >= 0.95 * on_demand_speed(job.place)
    assert cheap.nodes <= fast.nodes


def test_no_pipeline_spans_regions() -> None:
    zones = ["us-east-1a", "us-east-1b", "europe-west3-c", "europe-west3-a", "asia-south2-b"]
    changes = [NodeChange(at=0.0, change=Change.ADD, node=zone, zone=zone) for zone in zones]
    found = [{change.zone for change in one.changes} for one in zone_choices(make_trace(changes, duration=10.0))]
    assert found == [set(zones[:2]), set(zones[2:4]), *({zone} for zone in zones)]
    names = ("eastus-2", "eu-west-3c", "a", "rack-b")
    assert [region_of(zone) for zone in names] == ["eastus", "eu-west-3", "", ""]


def test_what_cannot_be_compared_is_named(job: ComparedJob) -> None:
    with pytest.raises(SimulationError, match="made-up: it says nothing of what was published"):
        published_job(profile())
    free = Costs(msgspec.structs.replace(job.profile, prices=None), job.spec)
    for name in ("checkpoint", OURS):
        with pytest.raises(SimulationError, match="a profile without prices"):
            compared(name, replace(job, place=replace(job.place, costs=free)), made(job, 0.1))
        with pytest.raises(SimulationError, match="the trace: expected nodes that come and go"):
            compared(name, job, make_trace())
        node = NodeChange(at=0.0, change=Change.ADD, node="a")
        priced = make_trace([node], [PriceChange(at=0.0, zone="zone-a", usd_per_hour=1.0)], duration=100.0)
        with pytest.raises(SimulationError, match="prices for zone-a, and none for nodes that say no zone"):
            compared(name, job, priced)
    huge = Workplace(costs=costs_of(profile(state=5000), 8), nodes=4, on_demand_nodes=4)
    assert strategy_result("checkpoint", huge, made(job, 0.1)).samples == 0


@pytest.mark.parametrize("name", shipped_names())
def test_the_strategies_have_the_same_baseline(name: str) -> None:
    """The on-demand job, which may choose a faster grid, trains 0.99 to 1.35 times as fast as published."""
    profile = read_profile(name)
    assert profile.published is not None
    trace = generate(Generation(nodes=8, hours=2, removal=0.1, addition=0.5), 1)
    job = published_job(profile)
    topology = {**job.document["spec"].get("topology", {}), "schedule": "1F1B"}  # as was published
    spec = parse_manifest({**job.document, "spec": {**job.document["spec"], "topology": topology}})
    place = replace(job.place, costs=Costs(profile, spec))
    found = compared(ON_DEMAND, replace(job, place=place, spec=spec), trace, 2)
    rate = profile.published.batch / profile.published.on_demand_seconds
    assert rate * 0.99 <= found.samples / (found.duration - found.idle - found.stalled) <= rate * 1.35


def costs(boundary: int = 10, gradients: int = 100) -> Costs:
    """Return costs for four layers of 1 s per sample and a batch of 8. boundary, gradients: bytes of a layer."""
    known = profile()
    layer = msgspec.structs.replace(known.layers[0], boundary=boundary, gradients=gradients)
    return costs_of(msgspec.structs.replace(known, layers=(layer,) * 4), 8)


def two_zones(each: int = 2) -> Trace:
    names = [(f"{zone}{number}", zone) for number in range(each) for zone in ("a", "b")]
    return make_trace(
        [NodeChange(at=0.0, change=Change.ADD, node=name, zone=zone) for name, zone in names], duration=1000.0
    )


def test_pipelines_are_formed_within_zones_and_what_they_send_each_other_is_paid() -> None:
    """Nodes of two zones join alternately; only the sum of gradients crosses zones: 800 bytes for eight samples."""
    known = costs()
    policy = Restarting(costs=known, choices=(2,), saving=Saving(every=1e9, pause=0, delay=0), mtbf=1e9)
    nodes = timeline(two_zones(), capacity=4, start=0.0, usd_per_hour=1.0)
    found = drive(policy, nodes, zone_price=1e6)
    assert found.crossed == pytest.approx(100 * found.samples)
    assert found.zone_usd == pytest.approx(found.crossed / 1e9 * 2 * 1e6)
    assert found.usd == pytest.approx(nodes.usd + found.zone_usd)
    assert drive(policy, nodes, zone_price=0.0).usd == nodes.usd


@pytest.mark.parametrize("name", SPOT)
def test_a_strategy_stays_in_one_zone_if_traffic_costs_more_than_it_brings(name: str) -> None:
    place = Workplace(costs=costs(), nodes=8, on_demand_nodes=2, zone_price=0.0)
    free = strategy_result(name, place, two_zones(4))
    dear = Workplace(costs=place.costs, nodes=8, on_demand_nodes=2, zone_price=1e6)
    found = strategy_result(name, dear, two_zones(4), objective=Aim.VALUE)
    assert free.crossed > 0
    assert found.crossed == 0
    assert found.samples < free.samples
