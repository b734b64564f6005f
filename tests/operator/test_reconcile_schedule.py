"""When a job is reconciled again."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bamboo_core.control.channel_events import Received
from bamboo_core.control.protocol import Heartbeat, ReportRequest
from bamboo_core.coordinator.coordinator import initial
from bamboo_core.coordinator.events import Emit, RemoveWorker, Send, Tick
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_operator.jobs.reconcile_schedule import (
    FINAL_EVENTS_SECONDS,
    FIRST_RETRY,
    GATHER_SECONDS,
    LAST_RETRY,
    MARGIN_SECONDS,
    RECONCILE_SECONDS,
    RESYNC_SECONDS,
    ReconcileOutcome,
    ReconcileSchedule,
    ReconcileTrigger,
)
from operator_kit import job

QUIET = SimpleNamespace(urgent=None, changed=None)


def outcome(**parts: bool | float) -> ReconcileOutcome:
    return ReconcileOutcome(**{"pods": True, "events": True, "status": True, **parts})  # type: ignore[arg-type]


def after(*, ended: float = 100.0, **parts: bool | float) -> ReconcileSchedule:
    return ReconcileSchedule().after(outcome(**parts), ended - 1, ended)


@pytest.mark.parametrize("failed", ["pods", "events", "status"])
def test_a_failed_reconciliation_is_repeated_sooner_and_then_less_and_less_often(failed: str) -> None:
    schedule = after()
    assert schedule.ok
    pauses = []
    for _ in range(8):
        schedule = schedule.after(outcome(**{failed: False}), 99.0, 100.0)
        assert not schedule.ok
        pauses.append(schedule.due(QUIET) - 100.0)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == LAST_RETRY
    again = schedule.after(outcome(), 0.0, 1.0).after(outcome(pods=False), 2.0, 3.0)
    assert again.due(QUIET) == 3.0 + FIRST_RETRY, "as after the first one"


def test_a_job_to_which_nothing_happens_is_looked_at_at_its_deadline_or_after_a_minute() -> None:
    assert ReconcileSchedule().due(QUIET) == -math.inf
    assert after().due(QUIET) == 100.0 + RESYNC_SECONDS
    assert after(deadline=103.5).due(QUIET) == 103.5 + MARGIN_SECONDS
    assert after(deadline=100.25).due(QUIET) == 100.25 + MARGIN_SECONDS
    assert after(deadline=99.5).due(QUIET) < 100.0, "it has come in the middle of the last reconciliation"
    assert after(deadline=500.0).due(QUIET) == 100.0 + RESYNC_SECONDS


def test_as_long_as_a_reconciliation_leaves_something_to_the_next_one_that_follows_soon() -> None:
    assert after(settled=False, deadline=150.0).due(QUIET) == 100.0 + RECONCILE_SECONDS
    assert after(unposted=True).due(QUIET) == 100.0 + RECONCILE_SECONDS


@pytest.mark.parametrize(
    ("urgent", "changed", "due"),
    [
        (110.0, None, 110.0 + GATHER_SECONDS),
        (99.5, None, 100.0 + GATHER_SECONDS),  # while the last one was under way
        (None, 110.0, 110.0 + GATHER_SECONDS),
        (None, 100.5, 100.0 + RECONCILE_SECONDS),
        (None, 99.5, 100.0 + RECONCILE_SECONDS),
        (101.0, 100.5, 101.0 + GATHER_SECONDS),
    ],
)
def test_what_is_urgent_does_not_wait_and_other_changes_at_most_as_long_as_they_always_did(
    urgent: float | None, changed: float | None, due: float
) -> None:
    assert after().due(SimpleNamespace(urgent=urgent, changed=changed)) == due


def test_changes_wait_for_an_api_server_that_refuses_and_what_is_urgent_does_not() -> None:
    failing = ReconcileSchedule(retry=LAST_RETRY).after(outcome(pods=False), 99.0, 100.0)
    assert failing.due(SimpleNamespace(urgent=None, changed=101.0)) == 100.0 + LAST_RETRY
    assert failing.due(SimpleNamespace(urgent=101.0, changed=101.0)) == 101.0 + GATHER_SECONDS


def test_a_job_is_not_over_before_its_end_is_in_the_status() -> None:
    unwritten = ReconcileSchedule().after(outcome(finished=True, status=False), 10.0, 10.5)
    assert (unwritten.over, unwritten.finished, unwritten.end_written) == (False, False, math.inf)
    assert unwritten.after(outcome(finished=True), 11.0, 11.5).over
    earlier = ReconcileSchedule().after(outcome(finished=False), 10.0, 10.5)
    assert not earlier.finished, "the status was computed before the end"


def test_events_that_cannot_be_posted_hold_up_the_end_for_a_while_only() -> None:
    left = outcome(finished=True, events=False, unposted=True)
    schedule = ReconcileSchedule().after(left, 10.0, 10.0)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    late = 10.0 + FINAL_EVENTS_SECONDS
    schedule = schedule.after(left, late, late)
    assert (schedule.over, schedule.end_written) == (False, 10.0)
    failed = schedule.after(outcome(finished=True, status=False, events=False, unposted=True), 60.0, 60.0)
    assert not failed.over, "only a reconciliation that has written the status ends it"
    assert failed.after(left, 61.0, 61.0).over


# what has happened


@pytest.fixture
def state() -> CoordinatorState:
    return initial(job(), {}, secret="s", save_path=None, now=0.0)


HEARTBEAT = Received("w0", Heartbeat(step=3, doing="trains"))


async def test_decisions_are_urgent_and_what_is_only_said_to_workers_is_none(state: CoordinatorState) -> None:
    for commands, urgent in (
        ((Send("w0", ReportRequest()),), False),
        ((Send("w0", ReportRequest()), Emit("Reason", "a sentence")), True),
        ((RemoveWorker("w0"),), True),
    ):
        trigger = ReconcileTrigger()
        trigger.handled(HEARTBEAT, state, commands)
        assert (trigger.urgent is not None, trigger.changed) == (urgent, None)


async def test_changes_of_what_a_reconciliation_looks_at_are_noticed_once_at_the_next_tick(
    state: CoordinatorState,
) -> None:
    trigger = ReconcileTrigger()
    trigger.handled(Tick(), state, ())
    trigger.clear()
    waiting = replace(state, membership=state.membership.requesting(3))
    trigger.handled(HEARTBEAT, waiting, ())
    assert trigger.changed is None, "of a thousand workers each may change something"
    trigger.handled(Tick(), waiting, ())
    assert (trigger.urgent, trigger.changed is not None) == (None, True)
    trigger.clear()
    progress = replace(waiting.progress, step=7, losses={6: 1.0}, last_at=5.0)
    further = replace(waiting, progress=progress)
    trigger.handled(Tick(), further, ())
    assert trigger.changed is None, "progress is written at its own rate"
    trigger.handled(Tick(), replace(further, course=further.course.entered("Running", 9.0)), ())
    assert trigger.changed is not None
