"""In which order one job's pools are asked for workers, what is told of it, and what a later operator knows."""

from collections.abc import Mapping
from typing import Any

from bamboo_core.coordinator.events import Emit
from bamboo_core.planning.hazards import Exposure
from bamboo_core.planning.pool_order import COOLDOWN_SECONDS, PATIENCE_SECONDS
from bamboo_operator.pods.pool_choice import PoolChoice
from bamboo_operator.prices.source import PriceSource
from operator_kit import job

POOLS = [{"name": "a", "pricePerHour": "1.00"}, {"name": "b", "pricePerHour": "0.99"}]
VALUE, LISTED = job(nodePools=POOLS, poolOrder="Value"), job(nodePools=POOLS)


class Chosen:
    """first: what the operator before this one has written."""

    def __init__(self, first: str = "", seen: Mapping[Any, Exposure] | None = None) -> None:
        self.told: list[Emit] = []
        self.choice = PoolChoice(lambda: seen or {}, PriceSource(), self.told.append, first)

    def look(
        self,
        now: float = 0.0,
        waiting: Mapping[str, tuple[str, float]] | None = None,
        spec: Any = VALUE,
        refused: tuple[str, str] | None = None,
    ) -> str:
        self.choice.look(spec, {"a": 2}, waiting or {}, 30.0, now, refused)
        return self.choice.ordered(spec.node_pools)[0].name

    def elsewhere(self, current: str) -> str | None:
        found = self.choice.elsewhere(self.choice.ordered(VALUE.node_pools), current, {"a": 1})
        return found.name if found else None


def test_the_first_pool_is_told_when_it_becomes_another_one() -> None:
    one = Chosen()
    assert [one.look(), one.look()] == ["b", "b"]
    (told,) = one.told
    assert told.reason == "PoolChosen"
    assert told.message.startswith("workers are asked for in pool b; an hour costs, with losses: b 0.99")
    assert one.look(spec=LISTED) == "a"
    assert one.choice.ranks == ()


def test_an_operator_that_comes_later_stays_with_the_pool_of_the_one_before() -> None:
    later = Chosen(first="a")
    assert later.look() == "a"
    assert later.told == []


def test_a_pod_goes_elsewhere_once_its_pool_has_given_it_no_node_for_long() -> None:
    one = Chosen(first="a")
    assert one.look(0.0, {"w0": ("a", 0.0)}) == "a"
    assert min(one.choice.deadlines) == PATIENCE_SECONDS
    assert one.elsewhere("a") is None
    later = PATIENCE_SECONDS + 1
    assert one.look(later, {"w0": ("a", later)}) == "b", "a pod's time goes on, whatever its age is said to be"
    assert one.elsewhere("a") == "b"
    assert one.elsewhere("b") is None
    assert one.look(later + COOLDOWN_SECONDS) == "b", "it is cheaper"
    both = {"w1": ("b", 0.0), "w2": ("a", 0.0)}
    one.look(later + COOLDOWN_SECONDS, both)
    assert one.elsewhere("a") is None


def test_a_pool_whose_worker_does_not_fit_is_left_for_another_for_a_while() -> None:
    one, cheap = Chosen(), job(nodePools=[POOLS[0], {"name": "b", "pricePerHour": "0.80"}], poolOrder="Value")
    assert one.look(spec=cheap) == "b"
    assert one.look(1.0, {"w2": ("b", 0.5)}, cheap, ("w1", "b")) == "a"
    assert one.told[-1].message.endswith("which has given no workers")
    assert one.elsewhere("b") == "a", "the pod that waits there would not fit either"
    assert one.look(COOLDOWN_SECONDS, None, cheap, ("w1", "b")) == "a"
    assert one.look(COOLDOWN_SECONDS + 1.0, None, cheap, ("w1", "b")) == "b", "no newer one was refused"
    assert one.look(COOLDOWN_SECONDS + 2.0, None, cheap, ("w3", "b")) == "a"
