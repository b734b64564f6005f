"""Which nodes a simulated job has, and what they cost."""

import pytest

from bamboo.traces.trace import PriceChange, make_trace
from job_simulation_kit import HOUR, job, nodes, run


def test_a_node_with_notice_is_not_used_again() -> None:
    """Its worker leaves before the end of the notice; the node is there until then, and no place for another one."""
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
