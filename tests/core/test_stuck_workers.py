"""Workers stuck inside an instruction while their heartbeats arrive: when the coordinator declares them lost."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import Emit, Tick
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Cell
from world import World


def training(seconds: float = 0.1, steps: int = 5, pipelines: int = 1) -> World:
    """Return a job that has trained `steps` steps under its plan. seconds: the duration of each."""
    world = World(3, pipelines, 1)
    world.settle()
    while world.state.step < world.state.plans.since_step + steps:
        world.commit()
    world.state = replace(world.state, progress=replace(world.state.progress, step_seconds=(seconds,) * steps))
    return world


def hold_up(world: World, stuck: set[str], seconds: float, before: float = 0.0) -> list[Emit]:
    """Let `seconds` pass without a commit, and return the events.

    stuck: workers that stay inside an instruction. before: seconds that they have already been inside it.
    """
    begun: float = world.now
    said: list[Emit] = []
    while world.now < begun + seconds:
        world.now += 1
        for worker in sorted(world.state.workers):
            busy = before + world.now - begun if worker in stuck else 0.0
            beat = protocol.Heartbeat(step=1, doing="inside Forward" if busy else "waiting", busy=busy)
            world.tell(Received(worker, beat))
        world.state, commands = coordinator.step(world.state, Tick(), world.now)
        said += [c for c in commands if isinstance(c, Emit)]
    return said


def owner(world: World) -> str:
    return world.plan.at(Cell(0, 1)).owner


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 60), (3.0, 60), (10.0, 200)])
def test_a_worker_that_is_stuck_is_lost_when_twenty_steps_could_have_been_done(step_seconds: float, limit: int) -> None:
    world = training(step_seconds)
    worker = owner(world)
    assert not hold_up(world, {worker}, limit - 2)
    said = hold_up(world, {worker}, 4, before=limit - 2)
    assert [e.reason for e in said][:3] == ["WorkerStuck", "WorkerLost", "Takeover"]
    assert said[0].warning
    assert "inside Forward" in said[0].message
    assert worker not in world.state.workers
    assert owner(world) != worker


def unprotected(state: CoordinatorState) -> CoordinatorState:
    return replace(state, plans=replace(state.plans, synced=frozenset()))


def unfamiliar(state: CoordinatorState) -> CoordinatorState:
    return replace(state, plans=replace(state.plans, since_step=state.step - 2))


def unmeasured(state: CoordinatorState) -> CoordinatorState:
    return replace(state, progress=replace(state.progress, step_seconds=()))


def resized(state: CoordinatorState) -> CoordinatorState:
    return replace(state, progress=replace(state.progress, generation=-1))


@pytest.mark.parametrize("change", [unprotected, unfamiliar, unmeasured, resized])
def test_a_worker_is_not_given_up_if_that_would_lose_a_stage_or_nobody_knows_what_is_usual(
    change: Callable[[CoordinatorState], CoordinatorState],
) -> None:
    world = training()
    worker = owner(world)
    world.state = change(world.state)
    said = hold_up(world, {worker}, 300)
    assert "WorkerStuck" not in {e.reason for e in said}
    assert worker in world.state.workers


def test_after_a_minute_it_is_told_once_where_workers_are_that_hang() -> None:
    world = training(pipelines=2)
    both = sorted(world.plan.at(Cell(d, 0)).owner for d in range(2))
    assert not hold_up(world, set(both), 65)
    (said,) = hold_up(world, set(both), 600)
    assert (said.reason, said.warning) == ("NoProgress", True)
    where = "; ".join(f"{worker} is inside Forward" for worker in both)
    end = f"the job waits until its progress deadline of {world.spec.progress_deadline_seconds} s"
    assert re.fullmatch(rf"no step was committed for \d+ s: {where}; {end}", said.message)
    assert world.finish is None
    assert world.state.workers.keys() >= set(both), "it is a hint, and nothing follows"
