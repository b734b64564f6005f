"""A job's Kubernetes events: content, counted repetitions, and errors after which the operator drops an event."""

from typing import Any

import pytest

from bamboo_core.coordinator.events import Emit
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.event_queue import MOST_COUNTED, EventQueue, event, may_be_posted_later, post_events
from fake_api import FakeApi
from operator_kit import NOW, at

JOB = JobIdentity(("team", "tiny"), "u1")


class Events:
    """An API server that stores events."""

    def __init__(self) -> None:
        self.kept = FakeApi()

    async def call(self, method: str, path: str, body: Any = None, query: Any = None, kind: str = "") -> Any:
        if method == "POST":
            name = f"tiny.{len(self.kept.all('events'))}"
            return self.kept.create("events", {**body, "metadata": {"name": name}})
        found = self.kept.read("events", path.rpartition("/")[2])
        return self.kept.put("events", {**found, **body})

    def told(self) -> list[tuple[str, int]]:
        return [(event["message"], event["count"]) for event in self.kept.all("events").values()]


async def test_what_happens_again_is_counted_in_the_event_that_there_is() -> None:
    events, queue = Events(), EventQueue()
    for message in ("a", "b", "a", "a"):
        queue.append(Emit("WorkerEnded", message, True))
        await post_events(KubeApi(events), JOB, queue)
    assert events.told() == [("a", 3), ("b", 1)]
    queue.append(Emit("WorkerEnded", "a", False))
    await post_events(KubeApi(events), JOB, queue)
    assert events.told() == [("a", 3), ("b", 1), ("a", 1)], "a warning is another event"
    events.kept.all("events").clear()  # they are kept for an hour
    for _ in range(2):
        queue.append(Emit("WorkerEnded", "a", True))
    await post_events(KubeApi(events), JOB, queue)
    assert events.told() == [("a", 2)]


async def test_only_so_many_are_counted_on() -> None:
    events, queue = Events(), EventQueue()
    for n in range(MOST_COUNTED + 5):
        queue.append(Emit("Takeover", str(n)))
        await post_events(KubeApi(events), JOB, queue)
    assert len(queue.posted) == MOST_COUNTED


@pytest.mark.parametrize(
    ("status", "reason", "kept"),
    [
        (403, "Forbidden", True),
        (429, "TooManyRequests", True),
        (503, "Unavailable", True),
        (200, "NotJson", True),
        (422, "Invalid", False),
        (400, "BadRequest", False),
        (404, "NotFound", False),
    ],
)
def test_an_event_that_will_never_be_accepted_is_dropped(status: int, reason: str, kept: bool) -> None:
    assert may_be_posted_later(ApiError(status, reason, "")) is kept


def test_an_event_is_about_its_job() -> None:
    found = event(JobIdentity(("team", "n" * 300), "u1"), Emit("R" * 200, "m" * 2000, True), NOW)
    assert found["involvedObject"] | {"name": ""} == {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "namespace": "team",
        "name": "",
        "uid": "u1",
    }
    assert (len(found["reason"]), len(found["message"]), found["type"]) == (128, 1000, "Warning")
    assert found["firstTimestamp"] == found["lastTimestamp"] == at(0)
