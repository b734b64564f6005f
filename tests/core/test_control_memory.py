"""What workers say of their memory: on its way to the coordinator, and there."""

import pytest

from bamboo_core.control.channel_events import Received
from bamboo_core.control.codec import decode_from_worker, encode
from bamboo_core.control.memory import MOST, Memory
from bamboo_core.control.protocol import Heartbeat
from bamboo_core.coordinator.job_status import status
from world import World


def test_memory_travels_with_the_heartbeat() -> None:
    beat = Heartbeat(step=3, doing="training", memory=Memory(peak=5, limit=MOST))
    assert decode_from_worker(encode(beat)) == beat
    assert decode_from_worker('{"type":"Heartbeat","step":3}') == Heartbeat(step=3)


@pytest.mark.parametrize(
    "wrong", ['{"peak":-1,"limit":1}', '{"peak":1.5,"limit":2}', f'{{"peak":1,"limit":{MOST + 1}}}', '{"peak":1}', "7"]
)
def test_what_is_no_memory_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="malformed message"):
        decode_from_worker(f'{{"type":"Heartbeat","step":3,"memory":{wrong}}}')


def test_the_coordinator_keeps_the_newest_of_each_worker() -> None:
    world = World(2, 1, 0)
    world.settle()
    for worker, peak in (("w0", 3), ("w1", 7), ("w0", 9)):
        world.tell(Received(worker, Heartbeat(step=1, memory=Memory(peak=peak, limit=20))))
        world.tell(Received(worker, Heartbeat(step=1)))
    assert {worker: memory.peak for worker, memory in status(world.state, world.now).memory} == {"w0": 9, "w1": 7}
    world.lose("w0")
    assert [worker for worker, _ in status(world.state, world.now).memory] == ["w1"]
