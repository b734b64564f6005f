"""The simulated world of candidates: nodes, prices, and the input of a run."""

import math
from dataclasses import replace

import msgspec
import pytest

from bamboo.sizing.price_list import MachinePrice
from bamboo.sizing.trials.candidate import as_the_job_is
from bamboo.sizing.trials.world import Market, has_price, machine_of
from bamboo.traces.generate import Generation
from bamboo.traces.trace import Change, NodeChange, PriceChange, make_trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.planning.profile import Prices
from job_simulation_kit import HOUR, manifest, nodes
from sizing_kit import layered, world

MADE_UP = Market(generation=Generation(nodes=4, removal=0.5, addition=0.9, zones=("a", "b", "c")))


def test_another_seed_begins_elsewhere_in_a_recording() -> None:
    """The first seed starts at the recording's beginning; the seeds' starts are spread evenly over the recording."""
    recorded = nodes(2, (600.0, "remove", "n0"), (1900.0, "add", "n2"), duration=HOUR)
    market, spec = Market(recording=recorded), parse_manifest(manifest(2, 1, 6))
    first, second = (market.trace(spec, seed, 2, 900.0) for seed in (1, 2))
    assert [change.at for change in first.changes if change.at > 0] == [600.0]
    assert [change.at for change in second.changes if change.at > 0] == [pytest.approx(100.0)]
    assert market.trace(spec, 3, 2, 900.0).changes == first.changes
    assert market.losses_per_hour(8) == pytest.approx(4 * market.losses_per_hour(2))


def test_made_up_nodes_are_present_for_the_share_of_time_that_they_last() -> None:
    found = MADE_UP.availability(100, 1000.0)
    assert sum(share for share, _ in found) == pytest.approx(1, abs=1e-3)
    assert sum(share * nodes for share, nodes in found) == pytest.approx(100 * 0.9 / 1.4, rel=0.01)
    calm = replace(MADE_UP, generation=Generation(nodes=4, removal=0.0, addition=0.9))
    assert calm.availability(7, 1.0) == ((1.0, 7),)
    gone = replace(MADE_UP, generation=Generation(nodes=4, removal=0.5, addition=0.0)).availability(100, 2.0)
    assert sum(share * nodes for share, nodes in gone) == pytest.approx(100 * (1 - math.exp(-1)), rel=0.01)
    short = MADE_UP.availability(100, 0.2)
    assert sum(share * nodes for share, nodes in short) > 95, "all of them are there at the beginning"


def test_recorded_nodes_are_as_many_as_there_were() -> None:
    recorded = nodes(2, (900.0, "remove", "n0"), duration=HOUR)
    assert sorted(Market(recording=recorded).availability(5, 1.0)) == [(0.25, 2), (0.75, 1)]
    assert sorted(Market(recording=recorded).availability(1, 1.0)) == [(0.25, 1), (0.75, 1)]


def test_a_price_file_comes_before_profile_and_pools_and_a_recording_before_it() -> None:
    pools = [{"name": "spot", "capacity": "Spot", "pricePerHour": "9"}]
    at = world(manifest(2, 1, 6, nodePools=pools), layered(2))
    known = MachinePrice(spot=0.5)
    machine = machine_of(layered(2), known)
    assert machine.profile.prices == Prices(spot=0.5, on_demand=3.0)
    at = replace(at, machines={"m": machine})
    run = at.run(as_the_job_is("m", at.spec), 1)
    assert [pool.price_per_hour for pool in run.spec.node_pools] == [None]
    assert run.trace.prices == ()
    over_time = make_trace(nodes(2).changes, [PriceChange(at=0.0, zone="", usd_per_hour=7.0)], duration=HOUR)
    at = replace(at, machines={"m": machine}, market=Market(recording=over_time))
    run = at.run(as_the_job_is("m", at.spec), 1)
    assert [p.usd_per_hour for p in run.trace.prices] == [7.0]


def test_a_node_costs_what_recorded_nodes_cost_on_average() -> None:
    at = world(manifest(2, 1, 6), layered(2))
    assert at.spot_usd("m") == 1.0
    changes = [NodeChange(at=0.0, change=Change.ADD, node=f"n{zone}", zone=zone) for zone in "ab"]
    prices = [PriceChange(at=20.0, zone="a", usd_per_hour=2.0), PriceChange(at=75.0, zone="a", usd_per_hour=4.0)]
    mean = (75 * 2.0 + 25 * 4.0) / 100  # the first price also counts before it
    for members, usd in ((changes[:1], mean), (changes, 1.0)):
        recording = make_trace(members, prices, duration=100.0)
        assert replace(at, market=Market(recording=recording)).spot_usd("m") == pytest.approx(usd)


def test_a_machine_without_any_price_is_known_as_such() -> None:
    bare = machine_of(msgspec.structs.replace(layered(2), prices=None), None)
    plain = parse_manifest(manifest(2, 1, 6))
    priced = parse_manifest(manifest(2, 1, 6, nodePools=[{"name": "s", "capacity": "Spot", "pricePerHour": "1"}]))
    assert not has_price(bare, plain, MADE_UP)
    assert has_price(bare, priced, MADE_UP)
    assert has_price(machine_of(layered(2), None), plain, MADE_UP)


def test_a_price_is_the_files_the_jobs_or_the_profiles() -> None:
    bare = msgspec.structs.replace(layered(2), prices=None)
    prices = {"Spot": "1.5", "OnDemand": "2.5"}
    pools = [{"name": kind.lower(), "capacity": kind, "pricePerHour": price} for kind, price in prices.items()]
    at = world(manifest(2, 1, 6, nodePools=pools), bare)
    assert at.spot_usd("m") == 1.5
    assert at.on_demand_usd("m") == 2.5
    shared = world(manifest(2, 1, 6, nodePools=pools, spread={"workersPerNode": 2}), bare)
    assert shared.on_demand_usd("m") == 5.0, "of a node with two workers"
    assert world(manifest(2, 1, 6), bare).on_demand_usd("m") is None
    assert world(manifest(2, 1, 6, nodePools=pools), layered(2)).on_demand_usd("m") == 2.5
    assert world(manifest(2, 1, 6), layered(2)).on_demand_usd("m") == 3.0
    none = replace(at, machines={"m": machine_of(layered(2), MachinePrice(spot=1.0))})
    assert none.on_demand_usd("m") is None, "a price file without one: it is not to be had"
