"""Parsing of pods and events into workers and events of a job."""

import pytest

from bamboo.remote.parsing import events_of, is_worker_of, workers_of
from bamboo.terminal.snapshot import UnseenEvents
from bamboo_core.names import worker_name
from bamboo_core.view.job_view import view_of
from remote_kit import NOW, Json, ended, event, job, node, pod, stamp

SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}


PULLING = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}


CREATING = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}


@pytest.mark.parametrize(
    ("status", "deleted", "state", "detail"),
    [
        ({}, False, "training", ""),
        ({}, True, "leaving", "its pod is being deleted"),
        (ended(0, "Completed"), False, "ended", ""),
        (ended(0, "Completed"), True, "ended", ""),
        (ended(137, "OOMKilled"), False, "failed", "OOMKilled, exit code 137"),
        ({"phase": "Failed", "reason": "Evicted", "containerStatuses": []}, False, "failed", "Evicted"),
        ({"phase": "Pending", "containerStatuses": [], "conditions": [SCHEDULED]}, False, "pending", "0/4 nodes are"),
        ({"phase": "Pending", "containerStatuses": [PULLING]}, False, "starting", "ImagePullBackOff: not found"),
        ({"phase": "Pending", "containerStatuses": [CREATING]}, False, "starting", ""),
    ],
)
def test_a_pod_says_how_its_worker_is(status: Json, deleted: bool, state: str, detail: str) -> None:
    body = pod(1, **status)
    if deleted:
        body["metadata"]["deletionTimestamp"] = stamp(-20)
    worker = workers_of(view_of(job()), [body])[0]
    assert (worker.state, worker.cells) == (state, ((0, 1),))
    assert detail in worker.detail
    assert bool(worker.detail) == bool(detail)


def test_a_running_worker_without_a_stage_is_a_spare_or_waits() -> None:
    assert workers_of(view_of(job()), [pod(4)])[0].state == "standby"
    assert workers_of(view_of(job(plan=None)), [pod(4)])[0].state == "waiting"


def test_workers_of_an_earlier_job_of_the_name_are_not_the_jobs() -> None:
    stranger = pod(7)
    stranger["metadata"]["ownerReferences"][0]["uid"] = "another"
    found = workers_of(view_of(job()), [pod(10), pod(2), stranger], {"node-2": node("node-2")})
    assert [(w.name, w.zone) for w in found] == [("story-w2", "zone-2"), ("story-w10", "")]


@pytest.mark.parametrize("name", ["story", "a" * 60, "story-w1"])
def test_pods_are_known_by_their_names(name: str) -> None:
    assert is_worker_of(name, worker_name(name, 12))
    assert not is_worker_of(name, worker_name(name + "x", 12))
    assert not is_worker_of(name, name)


def test_events_of_job_and_pods_are_told_in_order() -> None:
    of_job = [
        event("story", "Started", "it trains", 20),
        event(
            "story", "Old", "of an earlier job", 20, involvedObject={"kind": "BambooJob", "name": "story", "uid": "x"}
        ),
    ]
    of_pods = [
        event("story-w1", "Pulled", "image is there", 40),
        event("other-w1", "Pulled", "image is there", 40),
        event("story-w9", "Killing", "stopping", 5, type="Warning"),
        event("story-w2", "Scheduled", "long before the job", 10_000),
    ]
    found = events_of(view_of(job()), of_job, of_pods, ["story-w1"])
    assert [(h.about, h.reason, h.warning) for h in found] == [
        ("story-w1", "Pulled", False),
        ("story", "Started", False),
        ("story-w9", "Killing", True),
    ]


def test_an_events_time_is_found_in_all_forms() -> None:
    new = {"lastTimestamp": None, "eventTime": stamp(7), "series": {"count": 3, "lastObservedTime": stamp(3)}}
    found = events_of(view_of(job()), [event("story", "Again", "", **new)], [], [])[0]
    assert ((NOW - found.at).total_seconds(), found.count) == (3, 3)


def test_an_event_is_told_once_and_again_when_it_happens_again() -> None:
    unseen, first = UnseenEvents(), events_of(view_of(job()), [event("story", "X", "m")], [], [])
    again = events_of(view_of(job()), [event("story", "X", "m", count=2)], [], [])
    assert [len(unseen.of(tuple(found))) for found in (first, first, again, again)] == [1, 0, 1, 0]
