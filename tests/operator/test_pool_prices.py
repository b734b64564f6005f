"""What workers cost in pools by the prices that an operator reads."""

from decimal import Decimal
from typing import Any

import pytest

from bamboo_core.prices.price_list import parse_prices
from bamboo_operator.prices.pool_prices import priced_pools, unknown_machines, worker_price
from operator_kit import job

SPOT = {"name": "spot", "machine": "g5.xlarge", "pricePerHour": "9"}
SURE = {"name": "sure", "capacity": "OnDemand", "machine": "g5.xlarge", "afterSeconds": 60}
OWN = {"name": "own", "pricePerHour": "7"}
OTHER = {"name": "other", "machine": "g6.xlarge", "pricePerHour": "5"}
PRICES = parse_prices(
    "p",
    {
        "format": "bamboo-prices",
        "version": 1,
        "source": "",
        "machines": {"g5.xlarge": {"spot": 0.4, "onDemand": 1.2, "zones": {"z1": {"spot": 0.3}, "z2": {"spot": 0.8}}}},
    },
)


@pytest.mark.parametrize(
    ("pool", "zone", "price"),
    [
        (SPOT, "", "0.4"),
        (SPOT, "z1", "0.3"),
        (SPOT, "z1-a", "0.3"),
        (SPOT, "z9", "0.4"),
        (SURE, "z1", "1.2"),
        (OWN, "z1", "7"),
        (OTHER, "", "5"),
    ],
)
def test_a_worker_costs_what_its_machine_does_in_its_zone(pool: dict[str, Any], zone: str, price: str) -> None:
    spec = job(nodePools=[pool])
    assert worker_price(spec.node_pools[0], spec, PRICES, zone) == Decimal(price)


def test_a_worker_costs_its_share_of_the_node() -> None:
    spec = job(nodePools=[SPOT], spread={"workersPerNode": 3})
    assert worker_price(spec.node_pools[0], spec, PRICES) == Decimal("0.133333")


def test_without_prices_the_manifest_counts() -> None:
    spec = job(nodePools=[SPOT, OWN])
    assert priced_pools(spec, None, {"spot": ["z1"]}) == spec.node_pools
    exact = job(nodePools=[OTHER | {"pricePerHour": "0.123456789"}])
    assert priced_pools(exact, PRICES, {"other": ["z1", "z1"]}) == exact.node_pools


def test_a_pool_costs_the_mean_of_the_zones_that_its_workers_are_in() -> None:
    spec = job(nodePools=[SPOT, SURE, OWN])
    found = priced_pools(spec, PRICES, {"spot": ["z1", "z1", "z2"], "own": ["z1"]})
    assert [pool.price_per_hour for pool in found] == [Decimal("0.466667"), Decimal("1.2"), Decimal(7)]
    assert [pool.name for pool in found] == ["spot", "sure", "own"]


def test_what_has_no_price_is_said() -> None:
    known = job(nodePools=[SPOT, OWN])
    assert list(unknown_machines(known, PRICES)) == []
    spec = job(nodePools=[OTHER, {"name": "bare", "machine": "moon"}])
    assert list(unknown_machines(spec, PRICES)) == [
        "spec.nodePools[0].machine: the operator's prices know no g6.xlarge; pricePerHour counts",
        "spec.nodePools[1].machine: the operator's prices know no moon; its workers are not in the cost",
    ]
    (told,) = unknown_machines(job(nodePools=[SPOT]), None)
    assert told == "spec.nodePools[0].machine: the operator has read no prices (--prices); pricePerHour counts"
