"""The reconciler's decisions, without a cluster: who is given back, what is done next, which events are kept."""

import math

import pytest

from bamboo.coordinator.events import Emit
from bamboo.job.placement_spec import Capacity, NodePool
from bamboo.kube.errors import ApiError
from bamboo_operator.jobs.reconcile_schedule import (
    FINAL_EVENTS_SECONDS,
    LAST_RETRY,
    RECONCILE_SECONDS,
    ReconcileOutcome,
    ReconcileSchedule,
)
from bamboo_operator.manifests.event import event
from bamboo_operator.pods.scale_down import ScaleDown, WorkersByPool, scale_down
from bamboo_operator.status.event_queue import may_be_posted_later
from operator_kit import NOW, at, job

POOLS: tuple[NodePool, ...] = job(
    nodePools=[
        {"name": "spot", "capacity": "Spot"},
        {"name": "sure", "capacity": "OnDemand", "afterSeconds": 60, "revert": True},
    ]
).node_pools
SPOT, SURE = POOLS


def workers(placed: dict[str, str], **more: object) -> WorkersByPool:
    known: dict[str, object] = {"placed": placed, "without_node": {}, "joined": set(placed), "wanted": 2}
    return WorkersByPool(**{"pools": POOLS, **known, **more})  # type: ignore[arg-type]


def test_the_pools_are_what_the_tests_mean() -> None:
    assert [pool.capacity for pool in POOLS] == [Capacity.SPOT, Capacity.ON_DEMAND]


def test_a_fallback_worker_is_given_back_once_a_worker_of_an_earlier_pool_is_ready() -> None:
    placed = {"w0": "spot", "w1": "sure", "w2": "spot"}
    decision = scale_down(workers(placed, standby=["w2"], probes=frozenset({"w2"})))
    assert (decision.release, decision.probe, decision.delete) == ("w1", None, None)
    assert "sure" in decision.reason
    assert decision.probes == frozenset(), "it has joined, and is needed now"
    leaving = scale_down(workers(placed, standby=["w2"], leaving=["w0"], probes=frozenset({"w2"})))
    assert leaving == ScaleDown(), "one at a time"


def test_an_earlier_pool_is_tried_with_one_worker_more() -> None:
    placed = {"w0": "spot", "w1": "sure"}
    assert scale_down(workers(placed)).probe == SPOT
    assert scale_down(workers(placed, adding=1)).probe is None, "a worker is requested already"
    assert scale_down(workers(placed, training=False)).probe is None
    waiting = {**placed, "w2": "spot"}
    probing = workers(waiting, joined={"w0", "w1"}, without_node={"w2": "spot"}, probes=frozenset({"w2"}))
    assert scale_down(probing) == ScaleDown(probes=frozenset({"w2"})), "it goes on waiting, and is not one too many"


def test_a_probe_is_one_too_many_when_no_fallback_worker_is_left() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "spot"}
    waiting = workers(placed, joined={"w0", "w1"}, without_node={"w2": "spot"}, probes=frozenset({"w2"}))
    assert scale_down(waiting) == ScaleDown(delete="w2")


def test_when_a_probe_came_first_and_took_the_place_the_one_who_comes_late_is_one_too_many() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "sure"}
    assert scale_down(workers(placed, standby=["w2"], probes=frozenset({"w1"}))).release == "w2"


def test_workers_beyond_those_wanted_go_one_at_a_time() -> None:
    placed = {"w0": "spot", "w1": "spot", "w2": "spot", "w3": "spot"}
    decision = scale_down(workers(placed, standby=["w2", "w3"]))
    assert (decision.release, decision.reason) == ("w3", "w3 is released: 2 workers are wanted")
    assert scale_down(workers(placed, standby=["w2", "w3"], leaving=["w3"])).release is None
    assert scale_down(workers(placed)).release is None, "nobody is idle"


def outcome(**parts: bool) -> ReconcileOutcome:
    return ReconcileOutcome(**{"pods": True, "events": True, "status": True, **parts})


@pytest.mark.parametrize("failed", ["pods", "events", "status"])
def test_a_failed_reconciliation_is_repeated_sooner_and_then_less_and_less_often(failed: str) -> None:
    schedule = ReconcileSchedule().after(outcome(), 0.0)
    assert schedule.pause == RECONCILE_SECONDS
    pauses = []
    for _ in range(8):
        schedule = schedule.after(outcome(**{failed: False}), 0.0)
        pauses.append(schedule.pause)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == LAST_RETRY
    assert schedule.after(outcome(), 0.0).after(outcome(pods=False), 0.0).pause == 0.5, "as after the first one"


def test_a_job_is_not_over_before_its_end_is_in_the_status() -> None:
    unwritten = ReconcileSchedule().after(outcome(finished=True, status=False), 10.0)
    assert (unwritten.over, unwritten.finished, unwritten.end_written) == (False, False, math.inf)
    assert unwritten.after(outcome(finished=True), 11.0).over
    earlier = ReconcileSchedule().after(outcome(finished=False), 10.0)
    assert not earlier.finished, "the status was computed before the end"


def test_events_that_cannot_be_posted_hold_up_the_end_for_a_while_only() -> None:
    left = outcome(finished=True, events=False, unposted=True)
    schedule = ReconcileSchedule().after(left, 10.0)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    schedule = schedule.after(left, 10.0 + FINAL_EVENTS_SECONDS)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    failed = schedule.after(outcome(finished=True, status=False, events=False, unposted=True), 60.0)
    assert not failed.over, "only a reconciliation that has written the status ends it"
    assert failed.after(left, 61.0).over


@pytest.mark.parametrize(
    ("status", "reason", "kept"),
    [(403, "Forbidden", True), (429, "TooManyRequests", True), (503, "Unavailable", True), (200, "NotJson", True),
     (422, "Invalid", False), (400, "BadRequest", False), (404, "NotFound", False)],
)  # fmt: skip
def test_an_event_that_will_never_be_accepted_is_dropped(status: int, reason: str, kept: bool) -> None:
    assert may_be_posted_later(ApiError(status, reason, "")) is kept


def test_an_event_is_about_its_job() -> None:
    found = event(("team", "n" * 300), "u1", Emit("R" * 200, "m" * 2000, True), NOW)
    assert found["involvedObject"] | {"name": ""} == {
        "apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "namespace": "team", "name": "", "uid": "u1",
    }  # fmt: skip
    assert (len(found["reason"]), len(found["message"]), found["type"]) == (128, 1000, "Warning")
    assert found["firstTimestamp"] == found["lastTimestamp"] == at(0)
