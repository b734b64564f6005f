"""What an Eviction asks of a worker, and what is answered at which time."""

from typing import Any

import pytest

from bamboo_operator.signals.evictions import (
    EVICTION_SECONDS,
    HEARTBEAT_SECONDS,
    PASS_ON_SECONDS,
    RESPONDER,
    answer,
    eviction_signal,
)
from bamboo_operator.signals.signals import SignalKind
from eviction_kit import eviction
from operator_kit import NOW, at, pod

ENDED = pod(phase="Succeeded", ended={"exitCode": 0})


def test_the_operators_turn_is_a_notice_with_what_is_left_of_its_time() -> None:
    signal = eviction_signal(eviction(started=at(-40)), NOW)
    assert signal is not None
    assert (signal.kind, signal.source, signal.seconds) == (SignalKind.NOTICE, "EvictionRequest", EVICTION_SECONDS - 40)
    assert signal.message == "pod tiny-w3 is to be evicted, as drain.example/nodes asks"


def test_who_has_withdrawn_is_not_named() -> None:
    body = eviction()
    body["status"]["requesters"] = [{"name": "a.example/x", "intent": "Withdrawn"}]
    signal = eviction_signal(body, NOW)
    assert signal is not None
    assert signal.message.endswith("as an EvictionRequest asks")


@pytest.mark.parametrize(
    "body",
    [
        eviction(state="Inactive"),
        eviction(state="Interrupted"),
        eviction(state="Canceled"),
        eviction(state="Completed"),
        eviction(completionTime=at(-1)),
        eviction(responder="other.example/evictor"),
        {"metadata": {"uid": "e"}, "spec": {"target": {}}},
    ],
    ids=["not yet", "interrupted", "canceled", "completed", "answered", "another's turn", "new"],
)
def test_without_a_turn_there_is_neither_a_notice_nor_an_answer(body: dict[str, Any]) -> None:
    assert eviction_signal(body, NOW) is None
    assert answer(body, None, NOW, trains=True) is None


def test_a_worker_that_is_about_to_leave_is_told_of_from_minute_to_minute() -> None:
    first = answer(eviction(started=at(-1)), pod(), NOW, trains=True)
    assert first is not None
    assert first == {
        "heartbeatTime": at(0),
        "expectedCompletionTime": at(PASS_ON_SECONDS - 1),
        "message": "the worker leaves as soon as another one has taken over what it holds",
    }
    early, late = (eviction(started=at(-100), heartbeatTime=at(-age)) for age in (HEARTBEAT_SECONDS - 1, 60))
    assert answer(early, pod(), NOW, trains=True) is None
    assert (answer(late, pod(), NOW, trains=True) or {}).get("heartbeatTime") == at(0)


@pytest.mark.parametrize(
    ("of", "started", "trains", "said"),
    [
        (None, -5, True, "the worker has left"),
        (ENDED, -5, True, "the worker has left"),
        (pod(), -5, False, "the worker holds nothing"),
        (pod(phase="Pending"), -5, True, "the worker holds nothing"),
        (
            pod(),
            -PASS_ON_SECONDS,
            True,
            "no other worker could take over in 270 s; the eviction API may try",
        ),
    ],
    ids=["gone", "ended", "nobody trains", "not started", "too late"],
)
def test_an_eviction_is_completed(of: dict[str, Any] | None, started: float, trains: bool, said: str) -> None:
    """Also where the heartbeat is not due yet."""
    body = eviction(started=at(started), heartbeatTime=at(-1))
    assert answer(body, of, NOW, trains=trains) == {"heartbeatTime": at(0), "completionTime": at(0), "message": said}


def test_an_eviction_is_passed_on_before_the_coordinator_gives_the_worker_up() -> None:
    assert PASS_ON_SECONDS + HEARTBEAT_SECONDS / 4 <= EVICTION_SECONDS
    assert RESPONDER["priority"] == 10_000, "Kubernetes' word for the controller that manages a pod"
