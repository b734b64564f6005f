"""What a job's page says: the record that is kept for it, and the document that is made of it."""

import math
from typing import Any

import pytest

from bamboo_core.control.memory import Memory, Traffic
from bamboo_core.coordinator.events import CheckpointWrite, Emit, Outcome, SlowWorker, Status, WorkerState
from bamboo_core.job.spec import JobSpec
from bamboo_core.page import document as d
from bamboo_core.page.builder import Labels, document, ended, grid, state
from bamboo_core.page.history import JobHistory, StepFigures
from bamboo_core.view.job_view import view_of_run
from manifest_kit import training
from operator_kit import NOW, checkpoints, job, said
from page_kit import TAKEOVER, Time, received


def built(spec: JobSpec, live: Status, record: JobHistory | None = None, **more: Any) -> d.Document:
    """The page of a local run."""
    view = view_of_run(spec, live, NOW)
    return document(view, record or JobHistory(Time()), place="local", began=None, now=WHEN, **more)


WHEN = NOW.timestamp()


NOTHING = StepFigures(None)


SLOW = SlowWorker(worker="w1", pipeline=0, stage=1, seconds=0.2, usual=0.1, told="w1 takes 200 ms")


def test_a_slow_worker_is_marked_in_the_grid() -> None:
    ((first, second),) = grid(said(slow=(SLOW,)), Labels("tiny"))
    assert (first.slow, second.slow) == ("", "w1 takes 200 ms")


@pytest.mark.parametrize(
    ("changes", "name", "tone", "part"),
    [
        ({}, "Running", "good", "at least two workers"),
        ({"phase": "Pending"}, "Pending", "idle", "enough workers"),
        ({"phase": "Recovering"}, "Recovering", "warn", "restarted"),
        ({"phase": "Saving"}, "Saving", "warn", "write the weights"),
        ({"phase": "Over"}, "Over", "idle", "over"),
        (
            {"grid": ((("w0", True), ("w1", False)),)},
            "Degraded",
            "warn",
            "1 of 2 stages held by one worker only: pipeline 0 stage 1",
        ),
        (
            {"grid": ((("w0", False), ("w1", False)),)},
            "Degraded",
            "warn",
            "2 of 2 stages held by one worker only: pipeline 0 stage 0, pipeline 0 stage 1",
        ),
        ({"grid": ((("w0", True), ("w0", True)),)}, "Degraded", "warn", "w0 does the work of more than one stage"),
        ({"slow": (SLOW,)}, "Running", "warn", "held up: w1 takes 200 ms"),
        ({"workers": (("w0", WorkerState.TRAINING),)}, "Recovering", "warn", "The work of w1 is being taken over"),
    ],
)
def test_the_state_in_a_word_and_a_sentence(changes: dict[str, Any], name: str, tone: str, part: str) -> None:
    found = state(said(**changes), job(), Labels("tiny"))
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
    assert found == d.PageState(name=outcome.value, tone=tone, sentence="so it ended", over=True)


def test_the_document_has_the_job_its_curves_and_its_events() -> None:
    clock = Time(WHEN - 60)
    record = JobHistory(clock)
    record.follow(0, NOTHING, ())
    clock.now = WHEN - 5.00049
    record.follow(1, StepFigures(4.123456789, 1.5, 1e-4 / 3), (TAKEOVER,))
    record.add_event(Emit("TakenOver", "<script>alert(1)</script>", True))
    status = said(
        grid=((("tiny-w0", False), ("tiny-w9", True)), (("tiny-w0", True), ("tiny-w2", True))),
        workers=(
            ("tiny-w0", WorkerState.TRAINING),
            ("tiny-w2", WorkerState.LEAVING),
            ("tiny-w3", WorkerState.STANDBY),
            ("tiny-w4", WorkerState.SYNCING),
        ),
        unprotected=("pipeline 0 stage 0",),
        preemptions=3,
        notices=2,
        takeovers=(TAKEOVER,),
        loss=math.nan,
        samples_per_second=math.inf,
        gradient_norm=1.5,
        learning_rate=None,
        memory=(("tiny-w0", Memory(peak=12, limit=20)),),
        traffic=(("tiny-w0", Traffic(sync=3, gradient=4)),),
    )
    found = received(built(job(), status, record))
    assert found["version"] == d.VERSION
    assert [[(c["label"], c["state"], c["protected"], c["cells"]) for c in row] for row in found["grid"]] == [
        [("w0", "training", False, 2), ("w9", "lost", True, 1)],
        [("w0", "training", True, 2), ("w2", "leaving", True, 1)],
    ]
    assert [(w["label"], w["state"]) for w in found["others"]] == [("w3", "standby"), ("w4", "syncing")]
    assert found["points"] == [[1, round(WHEN - 5.00049, 3), 4.12346, 1.5, 3.33333e-05]]
    assert found["progress"]["loss"] is None
    assert found["progress"]["samplesPerSecond"] is None
    assert (found["progress"]["gradientNorm"], found["progress"]["learningRate"]) == (1.5, None)
    assert found["progress"]["samples"] == 8
    assert found["counts"] == {"preemptions": 3, "takeovers": 1, "notices": 2, "restarts": 0}
    (mark,) = found["marks"]
    assert (mark["kind"], mark["takeover"]["pause"], mark["takeover"]["victim"]) == ("takeover", 100.0, "w1")
    assert (mark["takeover"]["decide"], mark["takeover"]["reform"], mark["takeover"]["recompute"]) == (1, 20, 79)
    assert found["events"][0]["message"] == "<script>alert(1)</script>", "it is for the browser to take it as text"
    assert found["memory"] == [{"worker": "tiny-w0", "label": "w0", "peak": 12, "limit": 20}]
    assert (found["traffic"][0]["label"], found["traffic"][0]["total"], found["traffic"][0]["kinds"]["sync"]) == (
        "w0",
        7,
        3,
    )
    assert found["cost"] is None


def test_checkpoints_are_in_the_document_of_a_job_that_keeps_some() -> None:
    writing = CheckpointWrite(step=8, seconds=3.0, written=2, layers=6)
    kept = checkpoints(
        step=4,
        age=30.0,
        restores=1,
        repeated=3,
        repeated_seconds=6.0,
        place="s3://bucket/x",
        every_steps=4,
        writing=writing,
    )
    found = received(built(job(checkpoint={"storage": "s3://bucket/x"}), said(checkpoint=kept)))["checkpoint"]
    assert found == {
        "place": "s3://bucket/x",
        "everySteps": 4,
        "step": 4,
        "at": WHEN - 30,
        "seconds": 1.0,
        "bytes": 8,
        "writing": {"step": 8, "written": 2, "layers": 6, "since": WHEN - 3},
        "restores": 1,
        "repeated": 3,
        "repeatedSeconds": 6.0,
    }
    assert received(built(job(), said()))["checkpoint"] is None


def test_the_newest_evaluation_and_the_best_are_in_the_document() -> None:
    spec = job(training=training(10, 8, 2, evaluation={"everySteps": 2, "metric": "accuracy", "goal": "Max"}))
    told = said(evaluations=((2, {"accuracy": 0.5}), (4, {"accuracy": 0.25, "loss": math.nan})), best_evaluation=2)
    found = received(built(spec, told))["evaluation"]
    assert found == {
        "step": 4,
        "metric": "accuracy",
        "metrics": {"accuracy": 0.25, "loss": None},
        "bestStep": 2,
        "bestMetrics": {"accuracy": 0.5},
    }
    assert received(built(spec, said()))["evaluation"] is None
    assert received(built(job(), told))["evaluation"] is None


def test_an_early_stop_is_in_the_document_beside_the_steps_that_were_wanted() -> None:
    told = said(step=6, stopped_early="2 evaluations without a better loss")
    found = received(built(job(), told))["progress"]
    assert (found["step"], found["steps"]) == (6, 10)
    assert found["stoppedEarly"] == "2 evaluations without a better loss"


def test_who_ran_what_at_the_end_trains_no_more() -> None:
    found = built(job(), said(phase="Over"), ended=ended(Outcome.COMPLETE, "done"))
    assert {(c.state, c.protected) for row in found.grid for c in row} == {("ended", None)}
    assert found.others == ()


@pytest.mark.parametrize(
    ("worker", "label"), [("tiny-w0", "w0"), ("w0", "w0"), ("tiny-", "tiny-"), ("other-w0", "other-w0")]
)
def test_a_worker_s_label_is_short(worker: str, label: str) -> None:
    assert Labels("tiny")(worker) == label
