"""The coordinator's state as a person sees it."""

from bamboo.control import protocol
from bamboo.control.channel_events import Received
from bamboo.coordinator.events import (
    Tick,
)
from world import World


def test_a_job_that_stands_still_says_who_waits_for_what() -> None:
    world = World(2, 1, 0)
    world.settle()
    world.now += 2000
    for worker in world.state.workers:
        world.tell(Received(worker, protocol.Heartbeat(step=1, doing="waiting for rain")))
    world.tell(Tick())
    assert world.finish is not None
    assert world.finish.reason == "ProgressDeadlineExceeded"
    assert "w1 is waiting for rain" in world.finish.message
