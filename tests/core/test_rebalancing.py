"""Layers split anew for the sake of speed: whether it pays is measured, remembered, and not tried without end."""

from slow_world import trained

HALVES, THIRDS = ((0, 4), (4, 8)), ((0, 3), (3, 8))


def test_a_split_that_does_not_pay_is_taken_back_and_not_tried_again() -> None:
    """The dear backward is not seen in forwards, so it is put down to all layers of its stage: without that layer the
    stage is expected to be shorter than the one that gets it turns out to be.
    """
    world = trained(2, 1, 0)
    world.backward = {3: 6.0}
    world.train(600)
    assert world.reasons() == ["Rebalancing", "RebalancingDidNotPay", "Rebalancing", "Rebalanced"]
    assert world.plan.stages == HALVES
    assert "a step takes 4 s; 2.89 s were expected, and it took 3.52 s" in world.said("RebalancingDidNotPay")[0]
    assert "split as they were before" in world.said("Rebalancing")[1]
    assert world.state.balance.trial is None


def test_it_is_tried_again_when_speeds_have_changed() -> None:
    world = trained(2, 1, 0)
    world.backward = {3: 6.0}
    world.train(200)
    assert world.reasons().count("Rebalancing") == 2
    world.slowness[world.owner(0)] = 2.0
    world.train(400)
    assert world.reasons()[4:7] == ["StragglerFound", "Rebalancing", "Rebalanced"]
    assert world.plan.stages[0][1] < 4


def test_a_split_that_is_no_worse_stays_since_going_back_would_not_pay() -> None:
    """A step does not take what it was expected to, but going back would not make it shorter."""
    world = trained(2, 1, 0)
    world.slowness[world.owner(0)] = 2.0
    seconds, world.away = world.step_seconds(), 1000
    world.train(600, seconds=seconds)
    others = {"StragglerReplacementRequested", "StragglerKept"}
    assert [r for r in world.reasons() if r not in others] == ["StragglerFound", "Rebalancing", "RebalancingDidNotPay"]
    assert world.plan.stages == THIRDS


def test_speeds_that_change_all_the_time_are_not_chased() -> None:
    world = trained(2, 1, 0)
    first, second = world.owner(0), world.owner(1)
    moves = []
    for turn in range(30):
        world.slowness = {first if turn % 2 else second: 3.0}
        before = world.reasons().count("Rebalancing")
        world.train(40)
        moves += [turn] * (world.reasons().count("Rebalancing") - before)
    assert 1 <= len(moves) <= 4, moves
    assert len([turn for turn in moves if turn >= 8]) <= 1, "in the last 880 of 1200 steps"


def test_a_pipeline_over_two_pools_is_split_by_their_measured_speeds() -> None:
    """With equal stages all wait for the slower pool's workers; the best of all splits is three quarters as long."""
    world = trained(4, 1, 0)
    equal = world.step_seconds()
    assert [end - first for first, end in world.plan.stages] == [2, 2, 2, 2]
    world.slowness = {world.owner(stage): 2.0 for stage in (1, 3)}
    assert world.step_seconds() == 2 * equal
    world.train(200)
    assert [end - first for first, end in world.plan.stages] == [3, 1, 3, 1]
    assert world.step_seconds() == 1.5 * equal
    assert "Rebalanced" in world.reasons()
