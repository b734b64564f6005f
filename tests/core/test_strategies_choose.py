"""All strategies under the same nodes: what must hold for each, and what cannot be compared."""

from typing import Any

import pytest

from bamboo.planning.splits.resplit import Grid
from bamboo.profiles.files import read_profile
from bamboo.simulation.figures import SimulationError
from bamboo.simulation.strategies.choose import (
    ON_DEMAND,
    SPOT,
    STRATEGIES,
    Workplace,
    calibrated,
    strategy_result,
    workplace,
)
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, make_trace
from strategy_kit import profile


@pytest.fixture(scope="module")
def place() -> Workplace:
    return workplace(read_profile("vgg-v100"))


def made(place: Workplace, rate: float, seed: int = 1, hours: float = 8.0) -> Any:
    return generate(Generation(nodes=place.nodes, hours=hours, removal=rate, addition=0.5), seed)


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_preemptions_all_lose_only_their_start(place: Workplace, name: str) -> None:
    found = strategy_result(name, place, made(place, 0.0))
    assert found.goodput > 0.985
    assert (found.redone, found.preemptions) == (0, 0)


@pytest.mark.parametrize("name", SPOT)
def test_more_preemptions_never_train_more(place: Workplace, name: str) -> None:
    found = [strategy_result(name, place, made(place, rate, hours=4.0)).throughput for rate in (0.0, 0.2, 0.8)]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.9 * found[0]


def test_on_demand_nodes_have_the_published_step(place: Workplace) -> None:
    """The published grid takes its published time; another one of as many nodes may be faster."""
    published = place.costs.profile.published
    assert published is not None
    grid = Grid(published.on_demand_stages, published.on_demand_pipelines)
    assert place.costs.step(grid) == pytest.approx(published.on_demand_seconds, rel=1e-3)
    found = strategy_result(ON_DEMAND, place, made(place, 0.3))
    assert found.throughput >= 0.999 * published.batch / published.on_demand_seconds
    assert found.usd_per_hour <= 3.06 * place.on_demand_nodes + 1e-6
    assert calibrated(profile()) == profile()


def test_what_cannot_be_compared_is_named(place: Workplace) -> None:
    with pytest.raises(SimulationError, match="made-up: it says nothing of what was published"):
        workplace(profile())
    from msgspec.structs import replace

    known = workplace(profile(), batch=8, nodes=4)
    free = workplace(replace(profile(), prices=None), batch=8, nodes=4)
    with pytest.raises(SimulationError, match="a profile without prices"):
        strategy_result("bamboo", free, made(known, 0.1))
    with pytest.raises(SimulationError, match="the trace: expected nodes that come and go"):
        strategy_result("bamboo", known, make_trace())
    node = NodeChange(at=0.0, change=Change.ADD, node="a")
    priced = make_trace([node], [PriceChange(at=0.0, zone="zone-a", usd_per_hour=1.0)], duration=100.0)
    with pytest.raises(SimulationError, match="prices for zone-a, and none for nodes that say no zone"):
        strategy_result("bamboo", known, priced)
    huge = workplace(profile(state=5000), batch=8, nodes=4)
    assert strategy_result("checkpoint", huge, made(huge, 0.1)).samples == 0
