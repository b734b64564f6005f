"""How often nodes are taken away, by a recording of them."""

import pytest

from bamboo_core.planning.hazards import Exposure, exposures, hazard, of_pool
from bamboo_core.traces.trace import Change, NodeChange, make_trace

HOUR = 3600.0


def change(
    at: float, what: Change, node: str, pool: str = "spot", zone: str = "a", *, idle: bool = False
) -> NodeChange:
    return NodeChange(at=at * HOUR, change=what, node=node, pool=pool, zone=zone, idle=idle)


def test_without_a_record_it_is_what_is_usual_and_with_a_long_one_what_was_seen() -> None:
    assert hazard(Exposure()) == pytest.approx(0.05)
    assert hazard(Exposure(losses=0, hours=20)) == pytest.approx(0.025)
    assert hazard(Exposure(losses=3, hours=0.5)) == pytest.approx(4 / 20.5)
    assert hazard(Exposure(losses=2000, hours=10_000)) == pytest.approx(0.2, rel=0.01)


def test_losses_and_hours_are_of_each_pool_in_each_zone() -> None:
    trace = make_trace(
        [
            change(0, Change.ADD, "n1"),
            change(1, Change.ADD, "n2", zone="b"),
            change(2, Change.REMOVE, "n1"),
            change(3, Change.ADD, "n1", pool="other"),
            change(5, Change.REMOVE, "n2", zone="b", idle=True),
        ]
    )
    seen = exposures(trace, 7 * HOUR)
    assert seen == {
        ("spot", "a"): Exposure(losses=1, hours=2),
        ("spot", "b"): Exposure(losses=0, hours=4),
        ("other", "a"): Exposure(losses=0, hours=4),
    }
    assert of_pool(seen, "spot") == Exposure(losses=1, hours=6)
    assert of_pool(seen, "unknown") == Exposure()
