"""Node pools: the choice of a pool for a pod, the choice of the worker to give back, and prices."""

from decimal import Decimal

import pytest

from bamboo_core.job.placement_spec import MANY, Capacity, NodePool, next_prices
from bamboo_operator.pods.pools import (
    are_full,
    choose_pool,
    cost_of,
    fallback_pool,
    is_fallback,
    pool_to_probe,
    price_per_hour,
    worker_to_revert,
)

SPOT = NodePool(name="spot", price_per_hour=Decimal("0.91"), max_workers=8)
OTHER = NodePool(name="other", price_per_hour=Decimal("1.10"))
FALLBACK = NodePool(
    name="fallback",
    capacity=Capacity.ON_DEMAND,
    price_per_hour=Decimal("3.06"),
    after_seconds=300,
    max_workers=2,
)
LAST = NodePool(name="last", capacity=Capacity.ON_DEMAND, after_seconds=900)


@pytest.mark.parametrize(
    ("pools", "waited", "counts", "chosen"),
    [
        ([], None, {}, None),
        ([SPOT, FALLBACK], None, {}, "spot"),
        ([SPOT, FALLBACK], 299, {"spot": 7}, "spot"),
        ([SPOT, FALLBACK], None, {"spot": 8}, None),
        ([SPOT, FALLBACK], 299, {"spot": 8}, None),
        ([SPOT, FALLBACK], 300, {"spot": 8}, "fallback"),
        ([SPOT, FALLBACK], 300, {"spot": 2}, "fallback"),
        ([SPOT, FALLBACK], 300, {"spot": 2, "fallback": 2}, "spot"),
        ([SPOT, FALLBACK], 300, {"spot": 8, "fallback": 2}, None),
        ([SPOT, OTHER], None, {"spot": 8}, "other"),
        ([SPOT, OTHER], 1e6, {"spot": 7}, "spot"),
        ([SPOT, OTHER, FALLBACK], 300, {"spot": 8}, "fallback"),
        ([SPOT, FALLBACK, LAST], 899, {}, "fallback"),
        ([SPOT, FALLBACK, LAST], 900, {}, "last"),
        ([FALLBACK], 0, {}, None),
        ([FALLBACK], 300, {}, "fallback"),
    ],
)
def test_the_next_pod_goes_to_the_first_pool_with_room_that_is_due(pools, waited, counts, chosen):
    since = None if waited is None else 1000.0
    found = choose_pool(pools, 1000.0 + (waited or 0), since, counts)
    assert (found.name if found else None) == chosen


@pytest.mark.parametrize(
    ("pools", "counts", "prices"),
    [
        ([SPOT, FALLBACK], {}, ((0.91, 8), (3.06, 2))),
        ([SPOT, FALLBACK], {"spot": 5}, ((0.91, 3), (3.06, 2))),
        ([SPOT, FALLBACK], {"spot": 5, "fallback": 1}, ((3.06, 1), (0.91, 3))),  # there are no more spot nodes now
        ([SPOT, FALLBACK], {"spot": 8, "fallback": 2}, ()),
        ([SPOT, OTHER, FALLBACK], {"spot": 8}, ((1.10, MANY),)),
        ([LAST], {}, ()),
    ],
)
def test_what_more_workers_cost(pools, counts, prices):
    assert next_prices(pools, counts) == prices


@pytest.mark.parametrize(
    ("current", "waited", "counts", "target"),
    [
        ("spot", 299, {"spot": 1}, None),
        ("spot", 300, {"spot": 1}, "fallback"),
        ("spot", 300, {"spot": 1, "fallback": 2}, None),
        ("fallback", 300, {"fallback": 1}, None),
        ("fallback", 900, {"fallback": 1}, "last"),
        ("gone", 900, {}, "last"),
    ],
)
def test_a_pod_without_a_node_moves_on(current, waited, counts, target):
    found = fallback_pool([SPOT, FALLBACK, LAST], current, 1000.0 + waited, 1000.0, counts)
    assert (found.name if found else None) == target


def test_pools_are_full_only_if_none_has_room():
    assert choose_pool([SPOT, FALLBACK], 0.0, 0.0, {"spot": 8}) is None, "the fallback pool waits for its turn"
    assert not are_full([SPOT, FALLBACK], {"spot": 8})
    assert are_full([SPOT], {"spot": 8})
    assert not are_full([], {})


def test_a_full_earlier_pool_is_no_reason_to_move():
    assert fallback_pool([SPOT, OTHER], "spot", 1e6, 0, {"spot": 8}) is None


def test_on_demand_pools_after_spot_pools_are_fallbacks():
    pools = [SPOT, OTHER, FALLBACK]
    assert [is_fallback(pools, name) for name in ("spot", "other", "fallback", "x")] == [False, False, True, False]


@pytest.mark.parametrize(
    ("counts", "waiting", "tried"),
    [
        ({"spot": 3}, {}, None),
        ({"spot": 3, "fallback": 1}, {}, "spot"),
        ({"spot": 3, "fallback": 1}, {"spot": 1}, None),
        ({"spot": 8, "fallback": 1}, {}, None),
        ({"spot": 3, "last": 1}, {}, "spot"),
    ],
)
def test_an_earlier_pool_is_asked_again_for_nodes(counts, waiting, tried):
    found = pool_to_probe([SPOT, FALLBACK, LAST], counts, waiting)
    assert (found.name if found else None) == tried


PLACED = {"w0": "spot", "w1": "spot", "w2": "fallback", "w3": "fallback", "w4": "last"}


@pytest.mark.parametrize(
    ("standby", "leaving", "keep", "given_back"),
    [
        ([], [], 0, None),
        (["w1"], [], 0, "w4"),
        (["w1"], [], 1, None),
        (["w0", "w1"], [], 1, "w4"),
        (["w1"], ["w2"], 0, None),
        (["w3"], [], 0, "w4"),
        (["w1", "w3"], [], 1, "w4"),
        (["w4"], [], 0, None),
        (["unknown"], [], 0, None),
    ],
)
def test_a_worker_of_a_later_pool_goes_once_an_earlier_pool_has_a_spare_one(standby, leaving, keep, given_back):
    assert worker_to_revert([SPOT, FALLBACK, LAST], PLACED, standby, leaving, keep) == given_back


def test_of_a_pool_a_standby_worker_is_given_back_first_and_the_first_pool_gives_none_back():
    placed = {"w1": "spot", "w2": "fallback", "w3": "fallback"}
    assert worker_to_revert([SPOT, FALLBACK], placed, ["w1", "w3"], [], 1) == "w3"
    assert worker_to_revert([FALLBACK, SPOT], {"w0": "spot", "w1": "fallback"}, ["w0"], [], 0) is None


def test_a_price_is_known_only_if_all_pools_have_one():
    pools = [SPOT, FALLBACK, LAST]
    assert price_per_hour(pools, {"spot": 3, "fallback": 1, "last": 5}) == Decimal("5.79")
    assert price_per_hour(pools, {}) == 0
    assert price_per_hour([LAST], {"last": 1}) is None
    assert price_per_hour([], {}) is None
    assert cost_of(Decimal("3.60"), 10) == Decimal("0.01")
    assert cost_of(None, 10) == 0
