"""Splits of the layers by measured speed, and the rest between two of them."""

from bamboo_core.coordinator.splits.by_speed import REST_SECONDS
from slow_world import trained


def test_speeds_that_change_all_the_time_are_not_chased() -> None:
    world = trained(2, 1, 0)
    first, second, world.away = world.owner(0), world.owner(1), 1000
    for turn in range(30):
        world.slowness = {first if turn % 2 else second: 3.0}
        world.train(40)
    assert 2 <= world.reasons().count("Rebalancing") <= 1 + world.now / REST_SECONDS


def test_a_pipeline_over_two_pools_is_split_by_their_measured_speeds() -> None:
    """With equal stages a step waits for the slower pool's workers. The best split takes three quarters of the time."""
    world = trained(4, 1, 0)
    equal = world.step_seconds()
    assert [end - first for first, end in world.plan.stages] == [2, 2, 2, 2]
    world.slowness = {world.owner(stage): 2.0 for stage in (1, 3)}
    assert world.step_seconds() == 2 * equal
    world.train(200)
    assert [end - first for first, end in world.plan.stages] == [3, 1, 3, 1]
    assert world.step_seconds() == 1.5 * equal
