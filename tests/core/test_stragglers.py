"""Slow workers, and layers that take longer than their counted costs say: detection and mitigation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator.coordinator import step
from bamboo_core.coordinator.events import (
    RemoveWorker,
    RequestsWithdrawn,
    Tick,
)
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.splits.by_speed import REST_SECONDS
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.planning.splits.speeds import StageTimes
from slow_world import Slowed, trained


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 1)])
def test_a_slow_worker_is_found_and_one_that_stands_by_takes_its_place(grid: tuple[int, int, int]) -> None:
    world = trained(*grid)
    slow = world.owner(1)
    world.slowness[slow] = 2.0
    world.train(8)
    assert world.reasons() == [], "it is not slow for long enough"
    world.train(40)
    assert world.reasons() == ["StragglerFound", "StragglerReplaced"]
    one, other = world.said("StragglerFound")[0].split(";")
    own, usual = (480, 240) if grid[0] == 2 else (240, 120)
    assert f"{slow} takes {own} ms for a microbatch of stage 1 of pipeline 0" in one
    assert f"others would take {usual} ms" in other
    assert not world.state.plan or slow not in world.plan.holders()
    assert slow not in world.state.workers or world.state.workers[slow].released
    assert not world.state.membership.preemptions
    assert world.count == grid[0] * grid[1] + grid[2] + 1, "one more worker was asked for, once"


def test_without_a_standby_it_gets_fewer_layers() -> None:
    world = trained(2, 1, 0)
    slow = world.owner(1)
    world.slowness[slow] = 3.0
    world.train(60)
    assert world.reasons() == ["StragglerFound", "Rebalancing"]
    assert (world.layers(slow), world.layers(world.owner(0))) == ([2], [6])
    assert "instead of" in world.said("Rebalancing")[0]
    plan = world.plan
    assert (plan.restore is not None, plan.sources) == (True, ())
    world.train(300)
    assert world.state.plan == plan, "it is as good as it gets"
    (shown,) = status(world.state, world.now).slow
    assert (shown.worker, round(shown.seconds, 3), round(shown.usual, 3)) == (slow, 0.36, 0.12), "it is still shown"


def test_layers_that_take_longer_than_counted_are_split_anew() -> None:
    """If layers take longer than their counted costs say, the coordinator moves layers and reports no slow worker."""
    world = trained(4, 1, 0)
    world.work = {0: 4.0, 1: 4.0}
    world.train(60)
    assert world.reasons() == ["Rebalancing"]
    assert "counted" in world.said("Rebalancing")[0]
    plan = world.plan
    assert plan.stages == ((0, 1), (1, 2), (2, 5), (5, 8))


@pytest.mark.parametrize(
    ("grid", "done"),
    [
        ((2, 1, 0), "Rebalancing"),
        ((4, 1, 0), "StragglerReplacementRequested"),  # no split of two layers a stage is better
        ((4, 1, 1), "StragglerReplaced"),
    ],
)
def test_who_becomes_slow_is_compared_with_itself_where_nobody_runs_the_same_layers(
    grid: tuple[int, int, int], done: str
) -> None:
    world = trained(*grid, shadows=False)
    slow = world.owner(1)
    world.slowness[slow] = 1.5
    world.train(60)
    assert world.reasons()[:2] == ["StragglerFound", done]
    own, usual = (360, 240) if grid[0] == 2 else (180, 120)
    told = world.said("StragglerFound")[0]
    assert told.startswith(f"{slow} takes {own} ms for a microbatch of stage 1")
    assert told.endswith(f"others would take {usual} ms")
    assert slow in world.said(done)[0], "not the layers"


def test_a_slow_worker_is_told_of_long_before_something_is_done() -> None:
    world = trained(4, 1, 1)
    world.edit(elastic={"stabilizationSeconds": 300})
    world.slowness[world.owner(1)] = 1.6
    world.train(45)
    assert world.reasons() == ["StragglerFound"]
    assert [one.worker for one in status(world.state, world.now).slow] == [world.owner(1)]
    world.train(600)
    assert world.reasons() == ["StragglerFound", "StragglerReplaced"]


@pytest.mark.parametrize(
    ("factor", "others", "seconds"),
    [
        (0.5, 1.0, None),
        (1.25, 1.0, None),  # hardly slower
        (2.0, 1.0, 30.0),  # its computing is a small part of a step
        (1.6, 1.6, None),  # all together, with longer samples, say
    ],
)
def test_a_worker_that_holds_nobody_up_is_left_alone(factor: float, others: float, seconds: float | None) -> None:
    world = trained(4, 1, 1, shadows=others == 1.0)
    world.slowness = {**dict.fromkeys(world.state.workers, others), world.owner(1): factor}
    if seconds:
        world.state = replace(world.state, progress=replace(world.state.progress, step_seconds=()))
    world.train(60, seconds=seconds)
    assert world.reasons() == []


def test_one_that_recovers_is_told_of() -> None:
    world = trained(4, 1, 0)
    world.edit(elastic={"stabilizationSeconds": 300})
    slow = world.owner(1)
    world.slowness[slow] = 2.0
    world.train(30)
    world.slowness[slow] = 1.2
    world.train(10)
    assert world.reasons() == ["StragglerFound"], "it is not much better"
    world.slowness[slow] = 1.0
    world.train(5)
    assert world.reasons() == ["StragglerFound", "StragglerRecovered"]
    assert status(world.state, world.now).slow == ()


ASKED = ["StragglerFound", "StragglerReplacementRequested", "StragglerReplaced"]


@pytest.mark.parametrize(
    ("grid", "split", "slow"),
    [((1, 3, 0), None, (0, 1)), ((4, 1, 0), [2, 2, 2, 2], (1, 0)), ((8, 1, 0), None, (5, 0))],
    ids=["whole models", "a fixed split", "one layer each"],
)
def test_where_no_split_helps_one_more_worker_is_asked_for_and_takes_its_place(
    grid: tuple[int, int, int], split: list[int] | None, slow: tuple[int, int]
) -> None:
    world = trained(*grid, split=split)
    worker, there = world.owner(*slow), len(world.state.workers)
    world.slowness[worker] = 2.0
    world.train(80)
    assert world.reasons() == ASKED
    assert world.owner(*slow) != worker
    assert (world.count, world.state.membership.requested) == (there + 1, 0), "one, and no other one when it has left"
    world.train(300)
    assert world.reasons() == ASKED


def test_one_that_is_still_in_the_way_with_the_fewest_layers_is_replaced_and_they_are_split_evenly_again() -> None:
    world = trained(4, 2, 0)
    slow = world.owner(2, pipeline=1)
    world.slowness[slow] = 3.0
    world.train(400)
    assert world.reasons()[:4] == ["StragglerFound", "Rebalancing", *ASKED[1:]]
    assert world.plan.stages == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert world.layers(slow) == []


def asking() -> tuple[Slowed, str]:
    """Return a job that requested a replacement for a slow worker, and that worker. No replacement comes."""
    world = trained(1, 3, 0)
    slow, world.away = world.owner(0, 1), 1000
    world.slowness[slow] = 2.0
    while world.reasons() != ASKED[:2]:
        world.train(1)
    assert world.state.membership.requested == 1
    return world, slow


def test_nobody_is_waited_for_for_ever() -> None:
    """If no replacement comes, the slow worker stays, and the coordinator requests one again after REST_SECONDS."""
    world, slow = asking()
    again_at = world.now + REST_SECONDS
    world.train(158, seconds=4.0)
    assert world.reasons() == [*ASKED[:2], "StragglerKept"]
    assert slow in world.said("StragglerKept")[0]
    assert (surplus_requests(world.state), world.owner(0, 1)) == (1, slow)
    world.tell(RequestsWithdrawn(1))
    while world.now < again_at:
        assert world.reasons().count("StragglerReplacementRequested") == 1
        world.train(1, seconds=4.0)
    assert world.reasons().count("StragglerReplacementRequested") == 2


@pytest.mark.parametrize("how", ["it recovers", "it is lost"])
def test_a_worker_that_is_not_needed_any_more_is_not_asked_for(how: str) -> None:
    world, slow = asking()
    if how == "it recovers":
        world.slowness = {}
    else:
        world.lose(slow)
    world.train(10)
    missing = how == "it is lost"
    assert (world.state.membership.requested, surplus_requests(world.state)) == (1 + missing, 1)


@pytest.mark.parametrize(("headroom", "fits"), [(1.2, False), (2.0, True)])
def test_nobody_gets_layers_for_which_there_is_no_memory(headroom: float, fits: bool) -> None:
    """The coordinator rebalances only if a worker has memory for five layers instead of four, replicas included."""
    world = trained(4, 1, 0)
    slow = world.owner(1)
    world.slowness[slow], world.headroom, world.away = 3.0, dict.fromkeys(world.state.workers, headroom), 1000
    world.train(60)
    assert world.layers(slow) == ([1] if fits else [2])
    assert ("Rebalancing" in world.reasons()) == fits


def test_no_more_workers_are_replaced_than_the_job_has() -> None:
    """A job with five workers replaces at most five, however many become slow one after the other."""
    world = trained(4, 1, 1)
    for _ in range(200):
        world.slowness = {world.owner(1): 3.0}
        world.train(1)
    assert world.state.stragglers.replacements == 5


def replacing() -> tuple[Slowed, str, str]:
    """Return a job, the slow worker that it replaces, and the standby, which has no copy of the stage yet."""
    world = trained(4, 1, 1)
    slow = world.owner(1)
    world.slowness[slow] = 2.0
    while "StragglerReplaced" not in world.reasons():
        world.train(1)
    assert world.state.plan is not None
    (spare,) = world.state.workers.keys() - {world.owner(s) for s in range(4)}
    assert world.owner(1) == slow
    return world, slow, spare


def test_it_stays_if_who_was_to_take_its_place_is_lost() -> None:
    """A slow worker keeps its stage if its replacement is lost: this is faster than two stages on one worker."""
    world, slow, spare = replacing()
    world.away = 1000
    world.pending.clear()
    world.lose(spare)
    assert world.state.stays(slow)
    world.train(30)
    assert world.owner(1) == slow


TIMES = st.builds(
    StageTimes,
    layers=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    forward=st.floats(0, 1e9),
    backward=st.floats(0, 1e9),
    each=st.lists(st.floats(0, 1e9), max_size=3).map(tuple),
    microbatches=st.integers(0, 99),
)


@given(said=st.lists(st.tuples(st.integers(0, 5), st.lists(TIMES, max_size=3).map(tuple)), max_size=8))
def test_whatever_workers_say_of_their_times_the_job_goes_on(said: list[tuple[int, tuple[StageTimes, ...]]]) -> None:
    world = Slowed(4, 1, 1)
    world.settle()
    for worker, times in said:
        world.tell(Received(f"w{worker}", protocol.Heartbeat(step=1, times=times)))
        world.now += 1.0
        world.commit()
    world.settle_now()
    state, commands = step(world.state, Tick(), world.now + 1)
    assert state.phase == "Running"
    assert not [c for c in commands if isinstance(c, RemoveWorker)]
