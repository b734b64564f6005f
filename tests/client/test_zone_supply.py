"""What each zone has and costs, and which one is best."""

import pytest

from bamboo.sizing.trials.zone_supply import ZoneSupply, best_first, unknown_zones, zone_supplies
from bamboo_core.prices.price_list import MachinePrice, ZonePrice, zone_price
from bamboo_core.traces.trace import Change, NodeChange, PriceChange, make_trace

PRICES = MachinePrice(spot=1.0, zones={"us": ZonePrice(spot=0.9), "us-1": ZonePrice(spot=0.8)})


def test_a_zone_has_what_a_recording_says_of_it() -> None:
    changes = [
        NodeChange(at=0.0, change=Change.ADD, node="n1", zone="a"),
        NodeChange(at=0.0, change=Change.ADD, node="n2", zone="a"),
        NodeChange(at=30.0, change=Change.REMOVE, node="n2", zone="a"),
        NodeChange(at=50.0, change=Change.ADD, node="n3", zone="b"),
        NodeChange(at=50.0, change=Change.ADD, node="n4"),
    ]
    prices = [PriceChange(at=20.0, zone="a", usd_per_hour=1.0), PriceChange(at=75.0, zone="a", usd_per_hour=2.0)]
    found = zone_supplies(make_trace(changes, prices, duration=100.0))
    assert set(found) == {"a", "b"}, "a node of which no zone is known is in none"
    assert found["a"].mean(2) == pytest.approx((2 * 30 + 70) / 100)
    assert found["a"].mean(1) == 1.0
    assert found["b"].mean(9) == 0.5
    assert found["a"].usd == pytest.approx((75 * 1.0 + 25 * 2.0) / 100), "the first price counts before it, too"
    assert found["b"].usd is None


def test_a_price_of_a_region_is_that_of_its_zones() -> None:
    found = [zone_price(PRICES, zone) for zone in ("us-1a", "us-2a", "eu-1a")]
    assert found == [0.8, 0.9, None]
    assert zone_price(None, "us-1a") is None
    assert unknown_zones(PRICES, ("us-2a", "")) == ["us-1"]


def test_the_best_zone_is_the_cheapest_of_those_that_have_enough() -> None:
    prices = {"dear": 3.0, "cheap": 2.0, "empty": 1.0}
    supplies = {name: ZoneSupply(counts={nodes: 10.0}, usd=None) for name, nodes in (("dear", 8), ("cheap", 4))}
    supplies["empty"] = ZoneSupply(counts={0: 10.0}, usd=None)
    assert best_first(prices, supplies, 4) == ["cheap", "dear", "empty"]
    assert best_first(prices, supplies, 8) == ["dear", "cheap", "empty"]
    assert best_first({"a": 1.0, "b": 0.5, "c": 1.0}, {}, 8) == ["b", "a", "c"]
