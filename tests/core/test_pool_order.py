"""In which order node pools are asked for the next worker, by price and by losses."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.placement_spec import Capacity, NodePool
from bamboo_core.planning.hazards import Exposure
from bamboo_core.planning.pool_order import (
    COOLDOWN_SECONDS,
    PATIENCE_SECONDS,
    LossCost,
    in_order,
    rank_pools,
    still_failing,
)

LOSS = LossCost(seconds=360.0, job=10.0, start=0.0)  # a loss costs 1


def pool(name: str, price: str | None = "1", **more: Any) -> NodePool:
    return NodePool(name=name, price_per_hour=None if price is None else Decimal(price), **more)


def often(losses: int) -> Exposure:
    """So many losses in a hundred hours, as good as measured exactly."""
    return Exposure(losses=1000 * losses, hours=100_000)


def names(pools: list[NodePool], failing: tuple[str, ...] = (), first: str = "", **losses: int) -> list[str]:
    seen = {(name, "z"): often(number) for name, number in losses.items()}
    return [rank.name for rank in rank_pools(pools, seen, LOSS, failing, first)]


def test_what_losses_cost_counts_with_the_price() -> None:
    (rank,) = rank_pools([pool("a", "2")], {("a", "z"): often(30)}, LossCost(seconds=360, job=10, start=180), (), "")
    assert rank.cost == pytest.approx(2 + 0.3 * (1 + 0.1), rel=0.001)
    assert "a 2.33 (2 and 0.3 losses an hour)" in str(rank)


@pytest.mark.parametrize(
    ("pools", "losses", "order"),
    [
        ([pool("a", "1"), pool("b", "0.8")], {}, ["b", "a"]),
        ([pool("a", "0.9"), pool("b", "1.0")], {"a": 50, "b": 5}, ["b", "a"]),
        ([pool("a", "0.5"), pool("b", "1.0")], {"a": 50, "b": 5}, ["a", "b"]),
        ([pool("a"), pool("b")], {"a": 5, "b": 5}, ["a", "b"]),
        ([pool("a", None), pool("b", "9")], {"a": 50, "b": 5}, ["b", "a"]),
        ([pool("a", "1.04"), pool("b", "1.3", capacity=Capacity.ON_DEMAND)], {"a": 40}, ["b", "a"]),
        ([pool("a", "1.04"), pool("b", "1.3", capacity=Capacity.ON_DEMAND)], {"a": 10}, ["a", "b"]),
    ],
)
def test_the_pool_whose_hours_cost_least_comes_first(
    pools: list[NodePool], losses: dict[str, int], order: list[str]
) -> None:
    assert names(pools, **losses) == order


def test_who_is_first_stays_so_unless_another_one_is_cheaper_by_enough() -> None:
    pools = [pool("a", "1.00"), pool("b", "0.99")]
    assert names(pools) == ["b", "a"]
    assert names(pools, first="a") == ["a", "b"]
    assert names([pool("a", "1.00"), pool("b", "0.90")], first="a") == ["b", "a"]


def test_a_pool_that_gave_no_nodes_comes_last_for_a_while() -> None:
    pools = [pool("a", "1"), pool("b", "3")]
    assert names(pools, failing=("a",), first="a") == ["b", "a"]
    failed = still_failing({}, {"a": 0.0, "b": 10.0}, PATIENCE_SECONDS)
    assert failed == {"a": PATIENCE_SECONDS}
    assert still_failing(failed, {}, PATIENCE_SECONDS + COOLDOWN_SECONDS - 1) == failed
    assert still_failing(failed, {}, PATIENCE_SECONDS + COOLDOWN_SECONDS) == {}


POOLS = st.lists(
    st.builds(
        pool,
        st.sampled_from("abcdef"),
        st.none() | st.sampled_from(["0.5", "1", "2"]),
        after_seconds=st.sampled_from([0, 0, 60]),
    ),
    unique_by=lambda one: one.name,
)


@given(POOLS, st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50)), st.sets(st.sampled_from("abcdef")))
def test_every_pool_is_there_once_and_those_that_ask_for_patience_keep_their_places(
    pools: list[NodePool], losses: dict[str, int], failing: set[str]
) -> None:
    seen = {(name, ""): often(number) for name, number in losses.items()}
    ranks = rank_pools(pools, seen, LOSS, failing, "c")
    found = in_order(pools, ranks)
    assert sorted(one.name for one in found) == sorted(one.name for one in pools)
    assert all(now.name == was.name for now, was in zip(found, pools, strict=True) if was.after_seconds)
    assert [rank.delivers for rank in ranks] == sorted((rank.delivers for rank in ranks), reverse=True)


def test_of_the_pools_that_a_queue_leaves_those_with_a_rank_are_in_their_order() -> None:
    all_pools = [pool("dear", "3"), pool("ruled-out", "2"), pool("cheap"), pool("later", after_seconds=60)]
    ranks = rank_pools(all_pools, {}, LOSS, (), "")
    left = [pool("dear", "3"), pool("later"), pool("cheap")]
    assert [one.name for one in in_order(left, ranks)] == ["cheap", "later", "dear"]
