"""From a trace to the nodes that a job holds."""

import pytest

from bamboo.simulation.strategies.timeline import timeline
from bamboo_core.traces.trace import Change, NodeChange, PriceChange, make_trace


def test_nodes_are_held_up_to_the_capacity_and_paid_while_they_are_held() -> None:
    """c is taken at 100 s in place of a; b is gone before it is ready again as d."""
    changes = [
        NodeChange(at=at, change=change, node=node)
        for at, change, node in (
            (0.0, Change.ADD, "a"),
            (0.0, Change.ADD, "b"),
            (50.0, Change.ADD, "c"),
            (100.0, Change.REMOVE, "a"),
            (200.0, Change.REMOVE, "b"),
            (300.0, Change.ADD, "d"),
            (305.0, Change.REMOVE, "d"),
        )
    ]
    found = timeline(make_trace(changes, duration=400.0), capacity=2, start=10.0, usd_per_hour=3600.0)
    assert [(one.at, one.joined, one.lost) for one in found.changes] == [
        (10.0, ("a", "b"), ()),
        (100.0, (), ("a",)),
        (110.0, ("c",), ()),
        (200.0, (), ("b",)),
    ]
    assert (found.node_seconds, found.usd, found.removed) == pytest.approx((605.0, 605.0, 3))
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=3600.0), PriceChange(at=150.0, zone="", usd_per_hour=7200.0)]
    priced = timeline(make_trace(changes, prices, duration=400.0), capacity=2, start=10.0, usd_per_hour=0.0)
    assert priced.usd == pytest.approx(605.0 + 50 + 250 + 5)
