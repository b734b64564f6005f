"""Splits of the layers by the workers' measured speeds, and the least time between two such splits."""

from bamboo_core.coordinator.splits.by_speed import REST_SECONDS
from slow_world import trained


def test_speeds_that_change_all_the_time_are_not_chased() -> None:
    world = trained(2, 1, 0)
    first, second, world.away = world.owner(0), world.owner(1), 1000
    for turn in range(30):
        world.slowness = {first if turn % 2 else second: 3.0}
        world.train(40)
    assert 2 <= world.reasons().count("Rebalancing") <= 1 + world.now / REST_SECONDS
