"""The document of a job's page, from a local run and from the operator."""

import math
from typing import Any

import pytest

from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import Emit, Outcome, SlowWorker, Status, WorkerState
from bamboo_core.job.spec import JobSpec
from bamboo_core.job.status import read_status
from bamboo_core.page.document import (
    NOT_SEEN,
    OWNERS_ONLY,
    RESTARTED,
    VERSION,
    document,
)
from bamboo_core.page.timeline import JobTimeline, StepFigures
from bamboo_core.view.job_view import ShownState, ended, live_state, view_of_run
from bamboo_operator.http.job_pages import page_document as looked
from bamboo_operator.status.facts import OperatedJob, StatusFacts
from operator_kit import NOW, checkpoints, job, said, viewed
from page_kit import TAKEOVER, Time, received, written

WHEN = NOW.timestamp()
POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "1.00"},
    {"name": "fallback", "capacity": "OnDemand"},
]
SLOW = SlowWorker(worker="w1", pipeline=0, stage=1, seconds=0.2, usual=0.1, sentence="w1 takes 200 ms")


@pytest.mark.parametrize(
    ("changes", "name", "tone", "part"),
    [
        ({}, "Running", "good", "at least two workers"),
        ({"phase": "Pending"}, "Pending", "idle", "enough workers"),
        ({"phase": "Recovering"}, "Recovering", "warn", "restarted"),
        ({"phase": "Over"}, "Over", "idle", "over"),
        (
            {"grid": ((("w0", True), ("w1", False)),)},
            "Degraded",
            "warn",
            "1 of 2 stages held by one worker only: pipeline 0 stage 1",
        ),
        ({"grid": ((("w0", True), ("w0", True)),)}, "Degraded", "warn", "w0 does the work of more than one stage"),
        ({"slow": (SLOW,)}, "Running", "warn", "held up: w1 takes 200 ms"),
        ({"workers": (("w0", WorkerState.TRAINING),)}, "Recovering", "warn", "The work of w1 is being taken over"),
    ],
)
def test_the_state_in_a_word_and_a_sentence(changes: dict[str, Any], name: str, tone: str, part: str) -> None:
    found = live_state(said(**changes), job())
    assert (found.name, found.tone, found.over) == (name, tone, False)
    assert part in found.sentence


@pytest.mark.parametrize(
    ("outcome", "tone"),
    [
        (Outcome.COMPLETE, "good"),
        (Outcome.FAILED, "bad"),
        (Outcome.UNRECOVERABLE, "bad"),
        (Outcome.INTERRUPTED, "idle"),
    ],
)
def test_an_end_has_its_tone(outcome: Outcome, tone: str) -> None:
    found = ended(outcome, "so it ended")
    assert found == ShownState(name=outcome.value, tone=tone, sentence="so it ended", over=True)


def test_the_browser_gets_what_the_coordinator_says_and_what_is_recorded() -> None:
    """Numbers that are not finite become null; losses and takeovers come from the timeline."""
    clock = Time(WHEN - 60)
    record = JobTimeline(clock)
    record.follow(0, StepFigures(None), ())
    clock.now = WHEN - 5
    record.follow(1, StepFigures(4.5, 1.5, math.nan), (TAKEOVER,))
    record.add_event(Emit("TakenOver", "<script>alert(1)</script>", True))
    live = said(
        loss=math.nan,
        takeovers=(TAKEOVER,),
        memory=(("tiny-w0", Memory(peak=12, limit=20)),),
        traffic=(("tiny-w0", Traffic(sync=3, gradient=4)),),
        checkpoint=checkpoints(step=4, age=30.0, restores=1, repeated=3, place="s3://bucket/x", every_steps=4),
        evaluations=((4, {"accuracy": 0.25, "loss": math.nan}),),
    )
    found = received(document(view_of_run(job(), live, NOW), record, place="local", now=WHEN))
    assert (found["version"], found["job"]["began"], found["job"]["samples"]) == (VERSION, WHEN - 60, 8)
    shown = found["live"]
    assert (shown["loss"], shown["losses"], shown["takeovers"]) == (None, [], [])
    assert (shown["grid"], shown["workers"][0]) == ([[["w0", True], ["w1", True]]], ["w0", "training"])
    assert (shown["memory"][0][1]["peak"], shown["traffic"][0][1]["sync"]) == (12, 3)
    assert (shown["checkpoint"]["step"], shown["checkpoint"]["counts"]["repeated"]) == (4, 3)
    assert shown["evaluations"] == [[4, {"accuracy": 0.25, "loss": None}]]
    assert (found["status"]["takeovers"], found["status"]["restores"]) == (1, 1)
    assert found["points"] == [[1, WHEN - 5, [4.5, 1.5, None]]]
    assert (found["marks"][0]["kind"], found["marks"][0]["takeover"]["recompute_ms"]) == ("takeover", 79)
    assert found["events"][0][1]["message"] == "<script>alert(1)</script>", "it is for the browser to take it as text"
    over = said(phase="Over", eta_seconds=3.0, checkpoint=checkpoints(step=4, age=30.0))
    shown = received(document(view_of_run(job(), over, NOW), None, place="cluster", now=WHEN))["live"]
    assert (shown["eta_seconds"], shown["checkpoint"]["age"]) == (None, None)


def look(
    *,
    spec: JobSpec | None = None,
    written: Any = None,
    status: Status | None = None,
    record: JobTimeline | None = None,
) -> OperatedJob:
    """Return a job that the operator manages. written: its status in the API. status: its coordinator's."""
    spec = spec or job(nodePools=POOLS)
    facts = StatusFacts(now=NOW, generation=1, spec=spec, pods={"spot": 2})
    return OperatedJob(view=viewed(spec, read_status(written), status), facts=facts, record=record)


@pytest.mark.parametrize(
    ("name", "tone", "over"),
    [
        ("Running", "good", False),
        ("Degraded", "warn", False),
        ("Pending", "idle", False),
        ("Suspended", "idle", False),
        ("Invalid", "bad", False),
        ("Failed", "bad", True),
        ("Complete", "good", True),
    ],
)
def test_without_a_coordinator_the_status_speaks(name: str, tone: str, over: bool) -> None:
    found = looked(look(written=written(name)), WHEN).state
    assert found == ShownState(name=name, tone=tone, sentence=f"It is {name}.", over=over)


def test_a_job_that_has_only_just_been_seen() -> None:
    """Without a written status, the page shows a job as Pending, and later as its coordinator reports it."""
    found = looked(look(spec=job()), WHEN)
    assert (found.state.name, found.owners, found.unknown, found.pools) == ("Pending", (), (), ())
    assert (found.live, found.job.steps, found.job.began) == (None, 10, None)
    later = looked(look(status=said(phase="Pending"), record=JobTimeline(Time(WHEN))), WHEN)
    assert (later.state.name, later.state.sentence) == ("Pending", "Waiting for enough workers to start.")


def test_a_job_that_is_over_shows_from_its_status() -> None:
    """A job that is over shows no owners of stages, and no workers in its pools."""
    status = written("Complete", training={"step": 10}, plan='{"epoch":2,"pipelines":[["tiny-w0","tiny-w2"]]}')
    found = looked(look(written=status), WHEN)
    assert (found.owners, found.unknown, found.job.epoch) == ((), (NOT_SEEN,), 2)
    assert [(pool.name, pool.workers, pool.price) for pool in found.pools] == [
        ("spot", 0, "1.00"),
        ("fallback", 0, None),
    ]
    running = looked(look(written=written()), WHEN)
    assert [pool.workers for pool in running.pools] == [2, 0]


def test_after_a_restart_what_is_unknown_is_said() -> None:
    """Until workers are back, the page shows owners and progress from the status; earlier events stay unknown."""
    status = written(training={"step": 300, "steps": 1000}, plan='{"pipelines":[["tiny-w0","tiny-w2"]]}')
    away = said(phase="Recovering", grid=(), workers=(), step=0)
    found = looked(look(written=status, status=away, record=JobTimeline(Time(WHEN))), WHEN)
    assert (found.state.name, found.live, found.owners) == ("Recovering", None, (("tiny-w0", "tiny-w2"),))
    assert found.unknown == (OWNERS_ONLY, RESTARTED)
    later = looked(look(written=status, status=said(step=301), record=JobTimeline(Time(WHEN))), WHEN)
    assert (later.live is not None, later.owners, later.unknown) == (True, (), (RESTARTED,))
    seen = look(written=written(), status=said(), record=JobTimeline(Time(WHEN - 59)))
    assert looked(seen, WHEN).unknown == ()
