"""What strategies send from zone to zone, and whether they do it at all."""

import msgspec
import pytest

from bamboo.simulation.strategies.choose import SPOT, Aim, Workplace, strategy_result
from bamboo.simulation.strategies.costs import Costs
from bamboo.simulation.strategies.crossing import crossing_bytes
from bamboo.simulation.strategies.drive import drive
from bamboo.simulation.strategies.policies.restarting import Restarting
from bamboo.simulation.strategies.policy import Placement, Saving
from bamboo.simulation.strategies.timeline import timeline
from bamboo_core.traces.trace import Change, NodeChange, Trace, make_trace
from strategy_kit import costs_of, profile

ZONES = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}


def costs(boundary: int = 10, gradients: int = 100) -> Costs:
    """Four layers of a second; a stage of two has twice the gradients; a batch of eight samples."""
    known = profile()
    layer = msgspec.structs.replace(known.layers[0], boundary=boundary, gradients=gradients)
    return costs_of(msgspec.structs.replace(known, layers=(layer,) * 4), 8)


@pytest.mark.parametrize(
    ("rows", "copied", "expected"),
    [
        ((("a1", "a2"),), 0.0, 0.0),
        ((("a1", "b1"),), 0.0, 2 * 8 * 10),  # eight outputs, and their gradients
        ((("a1", "b1"),), 7.0, 2 * 8 * 10 + 2 * 7),  # each copies to the other
        ((("a1", "a2"), ("b1", "b2")), 0.0, 4 * 200),  # each sends as much as its gradients
        ((("a1", "b1"), ("a2", "b2")), 0.0, 2 * 2 * 4 * 10),
        ((("a1", ""), ("b1", "b2")), 0.0, 2 * 200),  # nobody is there that could send
        ((("a1", "a2"), ("b1",)), 0.0, 2 * 200 + 400),  # pipelines of two lengths
        ((), 0.0, 0.0),
    ],
)
def test_what_crosses_zones_in_a_step(rows: tuple[tuple[str, ...], ...], copied: float, expected: float) -> None:
    found = crossing_bytes(costs(), Placement(rows=rows, copied=copied), ZONES)
    assert 8 * found == pytest.approx(expected)


def two_zones(each: int = 2) -> Trace:
    names = [(f"{zone}{number}", zone) for number in range(each) for zone in ("a", "b")]
    return make_trace(
        [NodeChange(at=0.0, change=Change.ADD, node=name, zone=zone) for name, zone in names], duration=1000.0
    )


def test_pipelines_are_formed_within_zones_and_what_they_send_each_other_is_paid() -> None:
    """Nodes of both zones come in turn; still only the sum of gradients crosses: 800 bytes for eight samples."""
    known = costs()
    policy = Restarting(costs=known, choices=(2,), saving=Saving(every=1e9, pause=0, delay=0), mtbf=1e9)
    nodes = timeline(two_zones(), capacity=4, start=0.0, usd_per_hour=1.0)
    found = drive(policy, nodes, zone_price=1e6)
    assert found.crossed == pytest.approx(100 * found.samples)
    assert found.zone_usd == pytest.approx(found.crossed / 1e9 * 2 * 1e6)
    assert found.usd == pytest.approx(nodes.usd + found.zone_usd)
    assert drive(policy, nodes, zone_price=0.0).usd == nodes.usd


@pytest.mark.parametrize("name", SPOT)
def test_a_strategy_stays_in_one_zone_if_traffic_costs_more_than_it_brings(name: str) -> None:
    place = Workplace(costs=costs(), nodes=8, on_demand_nodes=2, zone_price=0.0)
    free = strategy_result(name, place, two_zones(4))
    dear = Workplace(costs=place.costs, nodes=8, on_demand_nodes=2, zone_price=1e6)
    found = strategy_result(name, dear, two_zones(4), objective=Aim.VALUE)
    assert free.crossed > 0
    assert found.crossed == 0
    assert found.samples < free.samples
