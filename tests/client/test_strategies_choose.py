"""Bamboo and all strategies under the same nodes: what must hold for each, and what cannot be compared."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bamboo.profiles.files import read_profile
from bamboo.simulation.comparison import (
    OURS,
    STRATEGIES,
    ComparedJob,
    CoordinatorRuns,
    compared,
    own_job,
    published_job,
)
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.strategies.choose import ON_DEMAND, SPOT, Aim, on_demand_speed, region_of, zone_choices
from bamboo.traces.generate import Generation, generate
from bamboo_core.traces.trace import Change, NodeChange, PriceChange, make_trace
from job_simulation_kit import manifest, parse_manifest
from strategy_kit import profile


@pytest.fixture(scope="module")
def job() -> ComparedJob:
    return published_job(read_profile("vgg-v100"))


def made(job: ComparedJob, rate: float, seed: int = 1, hours: float = 8.0) -> Any:
    return generate(Generation(nodes=job.place.nodes, hours=hours, removal=rate, addition=0.5), seed)


def small(**changes: Any) -> ComparedJob:
    """Of four layers, on at most four nodes."""
    document = manifest(4, 1, 8)
    return own_job(profile(**changes), parse_manifest(document), document)


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_preemptions_all_lose_only_their_start(job: ComparedJob, name: str) -> None:
    found = compared(name, job, made(job, 0.0))
    assert found.goodput > 0.98
    assert (found.redone, found.preemptions) == (0, 0)


@pytest.mark.parametrize("name", [*SPOT, OURS])
def test_more_preemptions_never_train_more(job: ComparedJob, name: str) -> None:
    found = [compared(name, job, made(job, rate, hours=2.0)).throughput for rate in (0.0, 0.2, 0.8)]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.9 * found[0]


def test_on_demand_nodes_are_at_least_as_fast_as_published(job: ComparedJob) -> None:
    """Another grid of as many nodes may be faster. All that are held are paid for."""
    published = job.profile.published
    assert published is not None
    found = compared(ON_DEMAND, job, made(job, 0.3))
    assert found.throughput == pytest.approx(on_demand_speed(job.place))
    assert found.throughput >= 0.999 * published.batch / published.on_demand_seconds
    assert found.usd_per_hour == pytest.approx(3.06 * job.place.on_demand_nodes)


def test_bamboos_figures_are_the_coordinators(job: ComparedJob) -> None:
    """Not more than the fastest grid of every moment could do, with all of the time accounted for."""
    trace = made(job, 0.3, hours=2.0)
    runs = CoordinatorRuns(job, trace)
    found = runs.best(Aim.THROUGHPUT)
    assert 0.9 * runs.bound(Aim.THROUGHPUT) < found.throughput <= runs.bound(Aim.THROUGHPUT)
    spent = found.productive + found.redone + found.stalled + found.idle
    assert spent == pytest.approx(found.duration)
    assert (found.preemptions, found.redone) == (sum(c.change is Change.REMOVE for c in trace.changes), 0)
    assert found.usd == pytest.approx(0.91 * found.node_seconds / 3600)


@pytest.mark.parametrize("name", ["checkpoint", OURS])
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


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(SimulationError, match="made-up: it says nothing of what was published"):
        published_job(profile())
    known = small()
    free = replace(
        known,
        place=replace(
            known.place,
            costs=own_job(msgspec.structs.replace(profile(), prices=None), known.spec, known.document).place.costs,
        ),
    )
    for name in ("checkpoint", OURS):
        with pytest.raises(SimulationError, match="a profile without prices"):
            compared(name, free, made(known, 0.1))
        with pytest.raises(SimulationError, match="the trace: expected nodes that come and go"):
            compared(name, known, make_trace())
        node = NodeChange(at=0.0, change=Change.ADD, node="a")
        priced = make_trace([node], [PriceChange(at=0.0, zone="zone-a", usd_per_hour=1.0)], duration=100.0)
        with pytest.raises(SimulationError, match="prices for zone-a, and none for nodes that say no zone"):
            compared(name, known, priced)
    huge = small(state=5000)
    assert compared("checkpoint", huge, made(huge, 0.1)).samples == 0
