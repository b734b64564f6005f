"""What is made of the events of pods that do not start, and of which pods and how often they are read."""

from collections.abc import Callable
from typing import Any

import pytest

from bamboo_operator.pods.starting.startup_events import (
    FIRST_SECONDS,
    LONGEST_MESSAGE,
    event_problem,
)
from operator_kit import at
from pod_controller_kit import Job, Place

pytest_plugins = ["pod_controller_fixtures"]
SECRET = 'MountVolume.SetUp failed for volume "credentials" : secret "s3" not found'
MAP = 'MountVolume.SetUp failed for volume "config" : configmap "data" not found'
SUMMARY = "Unable to attach or mount volumes: unmounted volumes=[credentials]: timed out waiting for the condition"


def event(reason: str, message: str, when: float = 0.0) -> dict[str, Any]:
    return {"reason": reason, "message": message, "type": "Warning", "lastTimestamp": at(when)}


@pytest.mark.parametrize(
    ("events", "reason", "message"),
    [
        ([event("FailedMount", SECRET)], "FailedMount", SECRET),
        ([event("FailedMount", SECRET), event("FailedMount", SUMMARY, 120)], "FailedMount", SECRET),
        ([event("FailedMount", SUMMARY)], "FailedMount", SUMMARY),
        ([event("FailedMount", SECRET), event("FailedMount", MAP, 60)], "FailedMount", f"{MAP}; {SECRET}"),
        ([event("FailedMount", MAP, 60), event("FailedMount", SECRET)], "FailedMount", f"{MAP}; {SECRET}"),
        ([event("FailedMount", SECRET), event("FailedMount", MAP, 600)], "FailedMount", MAP),  # the first one has come
        ([event("FailedMapVolume", "no block")], "FailedMount", "no block"),
        (
            [event("FailedAttachVolume", "elsewhere"), event("FailedMount", SUMMARY, 9)],
            "FailedAttachVolume",
            "elsewhere",
        ),
        ([event("FailedCreatePodSandBox", "no handler")], "FailedCreatePodSandBox", "no handler"),
        ([event("NetworkNotReady", "no CNI")], "NetworkNotReady", "no CNI"),
        ([event("Pulling", "x", -5), event("FailedMount", SECRET)], "FailedMount", SECRET),
        ([event("Scheduled", "x", 9), event("FailedMount", SECRET)], "FailedMount", SECRET),
    ],
)
def test_the_newest_cause_is_told(events: list[dict[str, Any]], reason: str, message: str) -> None:
    found = event_problem(events)
    assert found is not None
    assert (found.reason, found.message) == (reason, f"{reason}: {message}")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event("Scheduled", "x"), event("Unhealthy", "x")],
        [event("FailedMount", "failed to sync configmap cache"), event("Pulling", "x")],  # in the same second
        [event("FailedMount", SECRET), event("Started", "x", 600)],
    ],
)
def test_nothing_is_told_if_it_has_passed(events: list[dict[str, Any]]) -> None:
    assert event_problem(events) is None


@pytest.mark.parametrize(
    "when",
    [
        {"series": {"lastObservedTime": at(60.0)}, "eventTime": at(-900.0)},
        {"eventTime": at(60.0), "lastTimestamp": None},
        {"lastTimestamp": None, "metadata": {"creationTimestamp": at(60.0)}},
    ],
)
def test_an_event_tells_its_time_in_one_of_four_places(when: dict[str, Any]) -> None:
    newest = {"reason": "FailedMount", "message": MAP, **when}
    assert event_problem([event("FailedMount", SECRET, -120.0), newest]) == event_problem([event("FailedMount", MAP)])
    assert event_problem([newest, event("Started", "x", 61.0)]) is None


def test_a_message_of_any_length_is_cut() -> None:
    found = event_problem([event("FailedMount", "x" * 5000)])
    assert found is not None
    assert len(found.message) == LONGEST_MESSAGE


def uid(place: Place, name: str) -> str:
    found: str = place.pods[name]["metadata"]["uid"]
    return found


async def test_a_secret_that_is_missing_as_a_volume_is_named_until_it_is_there(begin: Callable[..., Job]) -> None:
    place = Place()
    waiting = begin(place)
    await waiting.reconciles()
    for name in ("tiny-w0", "tiny-w1"):
        place.stall(name, "ContainerCreating")
        place.events[uid(place, name)] = [event("FailedMount", SECRET)]
    await waiting.reconciles()
    assert (waiting.problems(), place.events_read) == ({}, []), "most pods only take a moment"
    await waiting.reconciles(FIRST_SECONDS)
    told = f"2 worker(s) cannot start: FailedMount: {SECRET} (tiny-w0, ...)"
    assert waiting.problems() == {"FailedMount": told}
    assert [(emit.message, emit.warning) for emit in waiting.runner.events if emit.reason == "FailedMount"] == [
        (told, True)
    ]
    place.run("tiny-w0", 0)
    await waiting.reconciles()
    assert waiting.problems() == {"FailedMount": f"1 worker(s) cannot start: FailedMount: {SECRET} (tiny-w1)"}
    place.run("tiny-w1", 0)
    await waiting.reconciles()
    assert waiting.problems() == {}


async def test_without_the_right_to_list_events_everything_else_is_done(begin: Callable[..., Job]) -> None:
    place = Place()
    place.no_events = True
    waiting = begin(place)
    await waiting.reconciles()
    place.stall("tiny-w0", "ContainerCreating")
    await waiting.reconciles()
    place.take("tiny-w1")
    await waiting.reconciles(FIRST_SECONDS)
    assert sorted(place.pods) == ["tiny-w0", "tiny-w2"]
