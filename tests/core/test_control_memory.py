"""The coordinator's record of each worker's newest memory report."""

from bamboo_core.control.memory import Memory
from bamboo_core.control.protocol import Heartbeat, Received
from bamboo_core.coordinator.job_status import status
from world import World


def test_the_coordinator_keeps_the_newest_of_each_worker() -> None:
    world = World(2, 1, 0)
    world.settle()
    for worker, peak in (("w0", 3), ("w1", 7), ("w0", 9)):
        world.tell(Received(worker, Heartbeat(step=1, memory=Memory(peak=peak, limit=20))))
        world.tell(Received(worker, Heartbeat(step=1)))
    assert {worker: memory.peak for worker, memory in status(world.state, world.now).memory} == {"w0": 9, "w1": 7}
    world.lose("w0")
    assert [worker for worker, _ in status(world.state, world.now).memory] == ["w1"]
