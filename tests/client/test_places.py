"""Where the workers of a local run are."""

from bamboo.local.places import LocalPlaces
from bamboo_core.control import protocol
from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.coordinator.events import Tick


def joined(worker: str) -> WorkerJoined:
    return WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, zone="z"))


def test_each_worker_has_a_zone_and_a_node_of_its_own() -> None:
    places = LocalPlaces(1)
    assert [places.next() for _ in range(4)] == [
        ("w0", "zone-a"),
        ("w1", "zone-b"),
        ("w2", "zone-c"),
        ("w3", "zone-a"),
    ]
    assert places.node("w1") == ""
    assert list(places.lost_with("w0", ["w0", "w1", "w3"])) == []
    assert places.located(joined("w0")) == joined("w0")


def test_workers_of_a_node_are_in_one_zone_and_lost_together() -> None:
    places = LocalPlaces(2)
    assert [places.next()[1] for _ in range(5)] == ["zone-a", "zone-a", "zone-b", "zone-b", "zone-c"]
    assert list(places.lost_with("w2", ["w0", "w1", "w2", "w3"])) == ["w3"]
    assert list(places.lost_with("w2", ["w0", "w2"])) == [], "w3 is gone already"
    located = places.located(joined("w3"))
    assert isinstance(located, WorkerJoined)
    assert (located.hello.node, located.hello.zone) == ("node-1", "z")
    assert places.located(joined("stranger")) == joined("stranger")
    assert places.located(Tick()) == Tick()
