"""What a shell goes by: all that there is to do and to tell, but for the progress of steps."""

from dataclasses import fields, replace

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.events import PROGRESS, Status, Tick
from bamboo_core.coordinator.shell_view import may_look_different, shell_view
from bamboo_core.coordinator.workers.record import WorkerEnds
from bamboo_core.planning.plan import Cell
from checkpoint_world import train
from world import World


@pytest.fixture
def world() -> World:
    made = World(2, 1, 1)
    made.settle()
    train(made, 3)
    return made


def test_whatever_a_status_tells_beside_progress_is_looked_at(world: World) -> None:
    state = world.state
    plan = state.current_plan
    shadow = plan.at(Cell(0, 0)).replicas[0]
    for after in (
        replace(state, membership=state.membership.losing("w9", taken=True)),
        replace(state, membership=state.membership.without("w9")),
        replace(state, membership=state.membership.requesting(1)),
        replace(state, ends=WorkerEnds(restarts=1, failures=("w0 exited",))),
        replace(state, admission=state.admission.refusing("w9", "torch 3", 1.0)),
        replace(state, plans=replace(state.plans, synced=state.plans.synced - {(Cell(0, 0), shadow)})),
        replace(state, workers=state.workers.noticed("w0", 60.0, 60.0)),
        replace(state, terms=state.terms.stopped_early(5, "nothing has become better")),
    ):
        assert may_look_different(state, after)
        assert shell_view(after) != shell_view(state)


def test_steps_and_what_workers_say_all_the_time_are_not(world: World) -> None:
    before = world.state
    world.commit()
    assert world.state.step > before.step
    assert shell_view(world.state) == shell_view(before)
    beat = protocol.Heartbeat(step=4, doing="trains", busy=1.0)
    heard, _ = coordinator.step(world.state, Received("w0", beat), world.now)
    assert heard != world.state
    assert not may_look_different(world.state, heard)
    later, _ = coordinator.step(heard, Tick(), world.now)
    assert not may_look_different(heard, later)


def test_a_field_of_a_status_is_looked_at_unless_it_is_marked() -> None:
    marked = {one.name for one in fields(Status) if one.metadata == PROGRESS}
    assert {"step", "losses", "memory"} < marked
    assert not marked & {"phase", "workers", "grid", "preemptions", "takeovers", "unprotected", "checkpoint", "slow"}
