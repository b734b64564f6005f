"""The schedule of a job's reconciliations: retries, urgent and other changes, and the last one."""

import math

import pytest

from bamboo_operator.jobs.reconcile_schedule import (
    FINAL_EVENTS_SECONDS,
    GATHER_SECONDS,
    RECONCILE_SECONDS,
    RESYNC_SECONDS,
    ReconcileSchedule,
)
from bamboo_operator.kube.attempts import FIRST_RETRY, LAST_RETRY


def after(*, unposted: bool = False) -> ReconcileSchedule:
    return ReconcileSchedule().after(99.0, 100.0, ok=True, unposted=unposted)


def test_a_failed_reconciliation_is_repeated_sooner_and_then_less_and_less_often() -> None:
    schedule = after()
    pauses = []
    for _ in range(8):
        schedule = schedule.after(99.0, 100.0, ok=False)
        pauses.append(schedule.due(None, None) - 100.0)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == LAST_RETRY
    again = schedule.after(0.0, 1.0, ok=True).after(2.0, 3.0, ok=False)
    assert again.due(None, None) == 3.0 + FIRST_RETRY, "as after the first one"


def test_a_job_to_which_nothing_happens_is_reconciled_every_five_seconds() -> None:
    assert ReconcileSchedule().due(None, None) == -math.inf
    assert after().due(None, None) == 100.0 + RESYNC_SECONDS
    assert after(unposted=True).due(None, None) == 100.0 + RECONCILE_SECONDS


@pytest.mark.parametrize(
    ("urgent", "changed", "due"),
    [
        (103.0, None, 103.0 + GATHER_SECONDS),
        (99.5, None, 100.0 + GATHER_SECONDS),  # while the last one was under way
        (None, 103.0, 103.0 + GATHER_SECONDS),
        (None, 100.5, 100.0 + RECONCILE_SECONDS),
        (None, 99.5, 100.0 + RECONCILE_SECONDS),
        (101.0, 100.5, 101.0 + GATHER_SECONDS),
    ],
)
def test_what_is_urgent_does_not_wait_and_other_changes_at_most_as_long_as_they_always_did(
    urgent: float | None, changed: float | None, due: float
) -> None:
    assert after().due(urgent, changed) == due


def test_changes_wait_for_an_api_server_that_refuses_and_what_is_urgent_does_not() -> None:
    failing = ReconcileSchedule(retry=LAST_RETRY).after(99.0, 100.0, ok=False)
    assert failing.due(None, 101.0) == 100.0 + LAST_RETRY
    assert failing.due(101.0, 101.0) == 101.0 + GATHER_SECONDS


def test_a_job_is_not_over_before_its_end_is_in_the_status() -> None:
    unwritten = ReconcileSchedule().after(10.0, 10.5, ok=False)
    assert (unwritten.over, unwritten.end_written) == (False, math.inf)
    assert unwritten.after(11.0, 11.5, ok=True, end_written=True).over


def test_events_that_cannot_be_posted_hold_up_the_end_for_a_while_only() -> None:
    schedule = ReconcileSchedule().after(10.0, 10.0, ok=False, end_written=True, unposted=True)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    late = 10.0 + FINAL_EVENTS_SECONDS
    schedule = schedule.after(late, late, ok=False, end_written=True, unposted=True)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    failed = schedule.after(60.0, 60.0, ok=False, unposted=True)
    assert not failed.over, "only a reconciliation that has written the status ends it"
    assert failed.after(61.0, 61.0, ok=False, end_written=True, unposted=True).over
