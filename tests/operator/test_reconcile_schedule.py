"""When a job is reconciled again."""

import math

import pytest

from bamboo_operator.jobs.reconcile_schedule import (
    FINAL_EVENTS_SECONDS,
    LAST_RETRY,
    RECONCILE_SECONDS,
    ReconcileOutcome,
    ReconcileSchedule,
)


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
