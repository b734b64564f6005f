"""What a job's page says: the record that is kept for it, and the document that is made of it."""

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from bamboo.control.memory import Memory
from bamboo.coordinator.events import CheckpointWrite, Emit, Outcome, SlowWorker, Takeover, WorkerState
from bamboo.page import document as d
from bamboo.page.builder import Labels, document, ended, grid, state
from bamboo.page.history import MOST_EVENTS, MOST_MARKS, Curves, JobHistory, StepFigures, steady_clock
from bamboo_operator.http.page_document import NO_ON_DEMAND, NO_PRICE, NOT_SEEN, OWNERS_ONLY, RESTARTED
from bamboo_operator.http.page_document import page_document as looked
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from bamboo_operator.status.job_view import JobView
from bamboo_operator.status.savings import CostComparison
from operator_kit import NOW, at, checkpoints, job, pool, said

TAKEOVER = Takeover(
    epoch=2, victim="tiny-w1", worker="tiny-w0", pipeline=0, stage=1, step=7, notice=False,
    decide_ms=1.0, reform_ms=20.0, recompute_ms=79.0, forwards=2, backwards=3, reused=4,
)  # fmt: skip
JOB = d.PageJob(name="tiny", namespace="default", place="local")
WHEN = NOW.timestamp()
POOLS = [
    {"name": "spot", "capacity": "Spot", "pricePerHour": "1.00"},
    {"name": "fallback", "capacity": "OnDemand", "pricePerHour": "3.50"},
]


NOTHING = StepFigures(None)


class Time:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# the record


@pytest.mark.parametrize(("steps", "kept"), [(0, 0), (1, 1), (7, 7), (8, 4), (9, 5), (10, 5), (16, 4), (100_000, 7)])
def test_curves_are_bounded_and_whole(steps: int, kept: int) -> None:
    curves = Curves(most=8)
    for step in range(1, steps + 1):
        curves.add(step, 10.0 * step, StepFigures(float(step), 2.0 * step, 3.0 * step))
    points = curves.points()
    assert len(points) == kept
    assert [p.step for p in points] == sorted({p.step for p in points})
    if points:
        assert (points[-1].step, points[-1].at) == (steps, 10.0 * steps)
        assert points[0].step <= max(1, steps / 3), "the beginning is lost"
    weights = [b.step - a for a, b in zip([0, *(p.step for p in points)], points, strict=False)]
    for times, name in ((1, "loss"), (2, "gradient_norm")):
        total = sum(w * getattr(p.figures, name) for w, p in zip(weights, points, strict=True))
        assert total == pytest.approx(times * steps * (steps + 1) / 2), "a point is not the mean of its steps"
    assert all(p.figures.learning_rate == 3 * p.step for p in points), "a rate is that of its point's last step"


def test_a_loss_that_is_not_known_spoils_no_mean() -> None:
    curves = Curves(most=2)
    for step, loss in enumerate([1.0, None, None, None], start=1):
        curves.add(step, step, StepFigures(loss))
    assert [p.figures for p in curves.points()] == [StepFigures(1.0)]


def test_the_record_takes_each_step_takeover_and_word_once() -> None:
    clock = Time()
    record = JobHistory(clock)
    record.follow(0, NOTHING, ())
    for now, step in ((1001, 1), (1002, 1), (1003, 2)):
        clock.now = now
        record.follow(step, StepFigures(5.0 - step), (TAKEOVER,) * (step - 1))
        record.follow(step, StepFigures(5.0 - step), (TAKEOVER,) * (step - 1))
    record.add_event(Emit("WorkerLost", "w1 is lost: killed", True))
    record.add_event(Emit("NoticeReceived", "w2 will be taken away", True))
    record.add_event(Emit("WorkerJoined", "w3 joined"))
    found = [(p.step, p.at, p.figures.loss) for p in record.curves.points()]
    assert found == [(1, 1001, 4.0), (2, 1003, 3.0)]
    assert [mark.kind.value for mark in record.marks] == ["takeover", "loss", "notice"]
    assert [emit.reason for _, emit in record.events] == ["WorkerLost", "NoticeReceived", "WorkerJoined"]


def test_what_a_coordinator_found_is_no_step_of_its_own() -> None:
    """The first it tells after its restart is known to be committed, but not when."""
    record = JobHistory(Time())
    record.follow(300, StepFigures(2.0), ())
    record.follow(301, StepFigures(1.9), ())
    assert [p.step for p in record.curves.points()] == [301]


def test_the_record_of_a_job_that_goes_back_to_a_checkpoint() -> None:
    """To go back is no step, and what is repeated is in the curves once more."""
    clock = Time()
    record = JobHistory(clock)
    for now, step in enumerate((0, 1, 2, 3, 1, 2, 3, 4), start=1000):
        clock.now = now
        record.follow(step, StepFigures(5.0 - step), ())
    record.add_event(Emit("Restored", "the job goes on from the checkpoint of step 1", True))
    assert [p.step for p in record.curves.points()] == [1, 2, 3, 2, 3, 4]
    assert [(mark.kind.value, mark.message[:15]) for mark in record.marks] == [("restore", "the job goes on")]


def test_the_record_is_bounded() -> None:
    record = JobHistory(Time())
    for n in range(1000):
        record.add_event(Emit("WorkerLost", str(n), True))
    assert (len(record.events), len(record.marks)) == (MOST_EVENTS, MOST_MARKS)
    assert record.marks[-1].message == "999"


def test_the_clock_is_the_wall_s_and_never_falls() -> None:
    clock = steady_clock()
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings)
    assert readings[0] > 1_700_000_000


# the document


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
)  # fmt: skip
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
            ("tiny-w0", WorkerState.TRAINING), ("tiny-w2", WorkerState.LEAVING), ("tiny-w3", WorkerState.STANDBY),
            ("tiny-w4", WorkerState.SYNCING),
        ),
        unprotected=("pipeline 0 stage 0",), preemptions=3, notices=2, takeovers=(TAKEOVER,),
        loss=math.nan, samples_per_second=math.inf, gradient_norm=1.5, learning_rate=None,
        memory=(("tiny-w0", Memory(log=7, replica=5)),), most_memory=("tiny-w1", Memory(log=9)),
    )  # fmt: skip
    found = d.plain(document(JOB, job(), status, record, now=WHEN))
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
    assert (found["memory"][0]["total"], found["memory"][0]["kinds"]["replica"]) == (12, 5)
    assert (found["mostMemory"]["label"], found["cost"]) == ("w1", None)


def test_checkpoints_are_in_the_document_of_a_job_that_keeps_some() -> None:
    writing = CheckpointWrite(step=8, seconds=3.0, written=2, layers=6)
    kept = checkpoints(
        step=4, age=30.0, restores=1, repeated=3, repeated_seconds=6.0, place="s3://bucket/x", every_steps=4,
        writing=writing,
    )  # fmt: skip
    found = d.plain(document(JOB, job(), said(checkpoint=kept), JobHistory(Time()), now=WHEN))["checkpoint"]
    assert found == {
        "place": "s3://bucket/x", "everySteps": 4, "step": 4, "at": WHEN - 30, "seconds": 1.0, "bytes": 8,
        "writing": {"step": 8, "written": 2, "layers": 6, "since": WHEN - 3}, "restores": 1, "repeated": 3,
        "repeatedSeconds": 6.0, "repeatedCost": None,
    }  # fmt: skip
    assert d.plain(document(JOB, job(), said(), JobHistory(Time()), now=WHEN))["checkpoint"] is None


KEEPING = {"storage": {"uri": "s3://bucket/x"}, "everySteps": 4}


def test_checkpoints_of_a_job_whose_coordinator_is_new_or_gone_are_as_the_status_has_them() -> None:
    spec = job(checkpoint=KEEPING, nodePools=POOLS)
    status = written(
        "Suspended", checkpoint={"lastStep": 8, "lastTime": at(-90)}, restores=2, repeatedSteps=7,
        cost={"total": "1", "repeated": "0.25"},
    )  # fmt: skip
    gone = looked(look(spec=spec, written=status), WHEN).checkpoint
    assert gone is not None
    assert (gone.place, gone.step, gone.at, gone.every_steps) == ("s3://bucket/x", 8, WHEN - 90, 4)
    assert (gone.restores, gone.repeated, gone.repeated_cost) == (2, 7, 0.25)
    unknown = checkpoints(step=None, place="s3://bucket/x", every_steps=4)
    new = looked(look(spec=spec, status=said(checkpoint=unknown), record=JobHistory(Time(WHEN)), written=status), WHEN)
    assert new.checkpoint is not None
    assert (new.checkpoint.step, new.checkpoint.at, new.checkpoint.repeated) == (8, WHEN - 90, 7)
    assert looked(look(spec=job(), written=status), WHEN).checkpoint is None, "it keeps none"


def test_who_ran_what_at_the_end_trains_no_more() -> None:
    found = document(
        JOB, job(), said(phase="Over"), JobHistory(Time()), now=WHEN, ended=ended(Outcome.COMPLETE, "done")
    )
    assert {(c.state, c.protected) for row in found.grid for c in row} == {("ended", None)}
    assert found.others == ()


@pytest.mark.parametrize(
    ("worker", "label"), [("tiny-w0", "w0"), ("w0", "w0"), ("tiny-", "tiny-"), ("other-w0", "other-w0")]
)
def test_a_worker_s_label_is_short(worker: str, label: str) -> None:
    assert Labels("tiny")(worker) == label


# on a cluster


def written(state: str = "Running", **more: Any) -> dict[str, Any]:
    """The status of a BambooJob."""
    kind = {"Invalid": "Accepted", "Pending": "WorkersReady", "Saving": "Running"}.get(state, state)
    condition = {
        "type": kind, "status": "True", "reason": "Because", "message": f"It is {state}.", "lastTransitionTime": at(-9),
    }  # fmt: skip
    return {"state": state, "conditions": [condition], "startTime": at(-60), **more}


def look(**more: Any) -> JobView:
    spec = more.pop("spec", None) or job(nodePools=POOLS)
    facts = more.pop("facts", None) or StatusFacts(now=NOW, generation=1, spec=spec)
    return JobView(namespace="team", name="tiny", spec=spec, facts=facts, **more)


def seen(since: float = -59.0, **more: Any) -> JobView:
    return look(status=said(), record=JobHistory(Time(WHEN + since)), written=written(), **more)


@pytest.mark.parametrize(
    ("name", "tone", "over"),
    [
        ("Running", "good", False), ("Degraded", "warn", False), ("Pending", "idle", False), ("Saving", "idle", False),
        ("Suspended", "idle", False), ("Invalid", "bad", False), ("Failed", "bad", True), ("Complete", "good", True),
    ],
)  # fmt: skip
def test_without_a_coordinator_the_status_speaks(name: str, tone: str, over: bool) -> None:
    found = looked(look(written=written(name)), WHEN).state
    assert found == d.PageState(name=name, tone=tone, sentence=f"It is {name}.", over=over)


def test_a_job_that_has_only_just_been_seen() -> None:
    found = looked(look(spec=job()), WHEN)
    assert (found.state.name, found.grid, found.unknown, found.cost) == ("Pending", (), (), None)
    assert (found.progress.step, found.progress.steps, found.job.began) == (None, 10, None)


def test_a_job_that_is_over_shows_from_its_status() -> None:
    training = {"step": 10, "steps": 10, "loss": 2.5, "samplesPerSecond": 9.0, "etaSeconds": 0}
    last = {"time": at(-5), "victim": "tiny-w1", "worker": "tiny-w0", "pipeline": 0, "stage": 1, "pauseSeconds": 0.04}
    status = written(
        "Complete", training=training, preemptions=4, takeovers=3, lastTakeover=last, cost={"total": "1.2500"},
        plan='{"epoch":2,"pipelines":[["tiny-w0","tiny-w2"]]}', epoch=2,
    )  # fmt: skip
    found = looked(look(written=status), WHEN)
    assert (found.progress.step, found.progress.loss, found.progress.eta_seconds) == (10, 2.5, None)
    assert (found.counts.preemptions, found.counts.takeovers, found.counts.notices) == (4, 3, None)
    assert (found.grid, found.unknown, found.epoch) == ((), (NOT_SEEN,), 2)
    assert found.marks[0].takeover is not None
    assert (found.marks[0].takeover.pause, found.marks[0].takeover.decide) == (40.0, None)
    assert found.cost is not None
    assert (found.cost.total, found.cost.per_hour) == (1.25, 0.0)


def test_after_a_restart_what_is_unknown_is_said() -> None:
    """Until the workers are back, owners and progress are as the status has them; the past stays unknown."""
    status = written(training={"step": 300, "steps": 1000}, plan='{"pipelines":[["tiny-w0","tiny-w2"]]}', takeovers=7)
    away = replace(said(phase="Recovering"), grid=(), workers=(), step=0)
    recovering = look(written=status, status=away, record=JobHistory(Time(WHEN)))
    found = looked(recovering, WHEN)
    assert (found.state.name, found.progress.step) == ("Recovering", 300)
    assert [[(c.label, c.state, c.protected) for c in row] for row in found.grid] == [
        [("w0", "unknown", None), ("w2", "unknown", None)]
    ]
    assert found.unknown == (OWNERS_ONLY, RESTARTED)
    later = looked(look(written=status, status=said(step=301), record=JobHistory(Time(WHEN))), WHEN)
    assert (later.progress.step, later.counts.takeovers, later.unknown) == (301, 7, (RESTARTED,))
    assert looked(seen(), WHEN).unknown == ()


@pytest.mark.parametrize("plan", [None, "", "[]", "{}", '{"pipelines":3}', '{"pipelines":[3]}', "no JSON"])
def test_a_plan_that_cannot_be_read_is_no_grid(plan: Any) -> None:
    assert looked(look(written=written("Suspended", plan=plan)), WHEN).grid == ()


def test_the_cost_and_the_same_on_demand() -> None:
    spec = job(nodePools=[*POOLS, {"name": "free"}])
    paid = {"spot": 3, "free": 5}
    counted = CostComparison()
    for _ in range(36):
        counted = counted.later(spec.node_pools, paid, 100.0, NOW)
    facts = StatusFacts(
        now=NOW,
        generation=1,
        spec=spec,
        paid=paid,
        cost=Decimal("0.5"),
        earlier=EarlierCounts(cost=Decimal(2)),
        comparison=counted,
    )
    found = looked(seen(spec=spec, facts=facts), WHEN).cost
    assert found is not None
    assert (found.total, found.per_hour, found.on_demand_per_hour) == (2.5, 3.0, 10.5)
    left = said().eta_seconds
    assert left == 3.5
    assert found.at_end == pytest.approx(2.5 + 3.0 * left / 3600)
    assert found.on_demand_at_end == pytest.approx(2.5 + 7.5 + 10.5 * left / 3600)
    suspended = looked(replace(seen(spec=spec, facts=facts), status=None), WHEN).cost
    assert suspended is not None
    assert (suspended.total, suspended.at_end, suspended.on_demand_at_end) == (2.5, None, None)
    assert (found.spent, found.on_demand, found.on_demand_pool) == (3.0, 10.5, "fallback")
    assert [(p.name, p.workers, p.price) for p in found.pools] == [
        ("spot", 3, "1.00"), ("fallback", 0, "3.50"), ("free", 5, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([{"name": "a"}], NO_PRICE),
        (POOLS[:1], NO_ON_DEMAND),
        ([*POOLS[:1], {"name": "b", "capacity": "OnDemand"}], NO_ON_DEMAND),
    ],
)
def test_what_the_cost_lacks_is_said(pools: list[Any], sentence: str) -> None:
    found = looked(seen(spec=job(nodePools=pools)), WHEN).cost
    assert found is not None
    assert (found.sentence, found.on_demand) == (sentence, None)
    assert CostComparison().later((pool(name="a"),), {"a": 3}, 60.0, NOW) == CostComparison()
