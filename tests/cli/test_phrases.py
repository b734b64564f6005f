"""Sentences that tell users about a job, such as why it waits or which steps suspending it loses."""

from datetime import UTC, datetime, timedelta

import pytest

from bamboo.terminal import phrases
from bamboo_core.view.job_view import view_of
from remote_kit import NOW, SPEC, Json, condition, job, stamp


def test_nobody_is_called_protected_by_a_status_that_nobody_writes() -> None:
    """Without an operator the condition Protected may stay true; without recent progress it is shown as unknown."""
    told = [condition("Running", True), condition("Protected", True, "Protected", "every stage has a copy")]

    def known(seconds: float, speed: float = 130.0) -> tuple[str, str]:
        training = {"step": 1, "steps": 2, "lastReportedTime": stamp(seconds), "samplesPerSecond": speed}
        seen = view_of(job(training=training, conditions=told))
        return phrases.protected(seen, NOW), phrases.protection(seen, NOW)

    assert known(15) == ("yes", "protected: yes, every stage has a copy (Protected)")
    assert known(300) == ("?", "protected: not known, it was yes, every stage has a copy (Protected)")
    assert known(300, speed=0.3)[0] == "yes", "a step takes minutes"


KEEPING = {**SPEC, "checkpoint": {"storage": "s3://bucket/x", "everySteps": 9}}


WAITING = condition("Running", False)


@pytest.mark.parametrize(
    ("spec", "status", "said"),
    [
        (SPEC, {}, "saves no checkpoints: it will start from step 0, which loses its 100 steps"),
        (SPEC, {"training": {"step": 0, "steps": 9}}, None),
        (KEEPING, {"conditions": [WAITING]}, "has no checkpoint yet: it will start from step 0"),
        (KEEPING, {"conditions": [WAITING], "checkpoint": {"lastStep": 99}}, "at step 99, which loses 1 step"),
        (KEEPING, {"conditions": [WAITING], "checkpoint": {"lastStep": 100}}, None),
        (KEEPING, {"conditions": [condition("Running", True)]}, None),  # its state is kept first
        ({**SPEC, "suspend": True}, {}, None),
        (SPEC, {"conditions": [condition("Complete", True)]}, None),
    ],
)
def test_who_suspends_is_told_which_steps_are_lost(spec: Json, status: Json, said: str | None) -> None:
    found = phrases.suspending(view_of(job(spec=spec, **status)))
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


SPENT = condition("Suspended", True, "BudgetSpent", "the budget of 5 is spent; with a larger one the job goes on")
IDLE = [condition("Accepted", True), condition("WorkersReady", False, "Suspended", "idle"), WAITING, SPENT]


def test_a_job_whose_budget_is_spent_says_what_helps() -> None:
    """If the spent budget, and not the manifest, suspends a job, the text says what helps."""
    rolling = condition("WorkersUpdated", False, "RollingOut", "1 of 4 workers are of revision abc")
    found = view_of(job(conditions=[*IDLE, rolling], state="Suspended"))
    assert phrases.why_waiting(found) == "the budget of 5 is spent; with a larger one the job goes on"
    assert phrases.outcome(found) == "Suspended: the budget of 5 is spent; with a larger one the job goes on"
    assert (phrases.suspending(found), phrases.rollout(found), phrases.stale(found, NOW)) == (None, "", "")
    just_resumed = view_of(job(conditions=[condition("Suspended", True, "Suspended", "the job is suspended")]))
    assert not just_resumed.suspended


def test_the_line_of_checkpoints_says_where_without_credentials_and_how_old() -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    known = {"checkpoint": {"lastStep": 99, "lastTime": "2026-03-01T12:00:00Z"}, "restores": 2}
    found = phrases.checkpoint(view_of(job(spec=KEEPING, **known)), at + timedelta(hours=2))
    place = "s3://bucket/x"
    assert found == f"checkpoint: step 99, 2:00:00 old, in {place}; went back 2 times"
    assert phrases.checkpoint(view_of(job(spec=KEEPING)), at) == f"checkpoint: none yet, in {place}"
    claim = {**SPEC, "checkpoint": {"storage": "pvc://data"}}
    assert phrases.checkpoint(view_of(job(spec=claim)), at) == "checkpoint: none yet, in pvc://data"
    assert phrases.checkpoint(view_of(job()), at) == "", "it keeps none"
    secret = {**SPEC, "checkpoint": {"storage": "s3://user:pass@bucket/x?sig=abc"}}
    assert phrases.checkpoint(view_of(job(spec=secret)), at) == "checkpoint: none yet", "a place that no manifest says"


def test_the_line_of_evaluations_has_the_newest() -> None:
    newest = {"step": 40, "metrics": {"accuracy": 0.25, "loss": 2.5}}
    told = phrases.evaluation(view_of(job(training={"evaluation": newest})))
    assert told == "evaluation after step 40: loss 2.5, accuracy 0.25"
    assert phrases.evaluation(view_of(job())) == "", "nothing was evaluated"
