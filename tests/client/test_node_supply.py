"""The nodes that a simulated job gets, and their prices."""

import pytest

from bamboo.traces.trace import Change, NodeChange, PriceChange, make_trace
from job_simulation_kit import HOUR, job, nodes, run


def test_a_node_with_notice_is_not_used_again() -> None:
    """The worker leaves before the notice ends; no other worker starts on the node."""
    told: list[str] = []
    run(job(), nodes(3, (1800.0, "remove", "n1"), notice=600.0), told=told)
    assert any("has left after its notice" in line for line in told)
    assert sum("WorkerJoined" in line for line in told) == 3


def test_nodes_that_are_not_wanted_cost_nothing_and_pools_on_demand_come_in() -> None:
    assert run(job(), nodes(10), price=1.0).figures.usd == pytest.approx(3.0)
    pools = [
        {"name": "spot", "capacity": "Spot", "pricePerHour": "1"},
        {"name": "safe", "capacity": "OnDemand", "pricePerHour": "3", "afterSeconds": 60},
    ]
    found = run(job(nodePools=pools), nodes(2)).figures
    assert found.usd == pytest.approx(2 * 1 + 3 * (1 - 60 / HOUR), rel=1e-3)
    assert found.waited * HOUR == pytest.approx(70, abs=1)


def test_prices_follow_the_trace() -> None:
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=1.0), PriceChange(at=1800.0, zone="", usd_per_hour=2.0)]
    trace = make_trace(nodes(3).changes, prices, duration=HOUR)
    assert run(job(), trace).figures.usd == pytest.approx(3 * 1.5)
    assert run(job(), nodes(3)).figures.usd != run(job(), nodes(3)).figures.usd  # not a number: no price is known


def test_a_node_with_several_workers_costs_what_it_costs_and_is_lost_with_all_of_them() -> None:
    """With four stages on nodes of two workers, neighbours are on different nodes, so a job survives a node's loss."""
    told: list[str] = []
    shared = job(4, spread={"workersPerNode": 2})
    found = run(shared, nodes(3, (1800.0, "remove", "n0")), told=told, price=1.0).figures
    assert found.usd == pytest.approx(2.0, rel=0.01)
    started = next(line for line in told if "Started" in line)
    assert "any node may be lost with all its workers" in started
    assert sum("WorkerLost" in line for line in told) == 2
    assert found.fatal == 0
    assert sum("WorkerJoined" in line for line in told) == 6, "the two that replace them share the third node"


def test_a_pools_price_is_that_of_one_worker_and_a_node_costs_it_for_each() -> None:
    spot = {"name": "spot", "capacity": "Spot", "pricePerHour": "1"}
    sure = {"name": "sure", "capacity": "OnDemand", "pricePerHour": "3", "afterSeconds": 0}
    for pools, here, usd in (([spot], 2, 4.0), ([sure], 0, 12.0)):
        shared = job(4, spread={"workersPerNode": 2}, nodePools=pools)
        found = run(shared, nodes(here or 1)).figures
        assert found.usd == pytest.approx(usd, rel=0.01), pools


def test_a_notice_for_a_node_is_one_for_each_of_its_workers() -> None:
    told: list[str] = []
    run(job(4, spread={"workersPerNode": 2}), nodes(3, (1800.0, "remove", "n0"), notice=120.0), told=told)
    assert sum("NoticeReceived" in line for line in told) == 2
    assert sum("has left after its notice" in line for line in told) == 2
    assert not any("WorkerLost" in line for line in told)


def test_nodes_belong_to_the_pool_whose_template_names_their_zone_and_cost_what_it_says() -> None:
    in_b = {"spec": {"nodeSelector": {"topology.kubernetes.io/zone": "b"}}}
    pools = [
        {"name": "first", "pricePerHour": "1", "maxWorkers": 1},
        {"name": "second", "pricePerHour": "10", "template": in_b},
    ]
    there = [("n0", "a"), ("n1", "a"), ("n2", "b"), ("n3", "b")]
    changes = [NodeChange(at=0.0, change=Change.ADD, node=name, zone=zone) for name, zone in there]
    found = run(job(nodePools=pools), make_trace(changes, duration=HOUR)).figures
    assert found.usd == pytest.approx(1 + 2 * 10, rel=1e-3)
