"""The content of a job's status, and when it is written."""

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.coordinator.events import WorkerState
from bamboo_core.job.api_object import written
from bamboo_core.job.status import read_status
from bamboo_operator.status.document import job_status, worth_writing
from crd_kit import STATUS_VALIDATOR
from operator_kit import NOW, at, checkpoints, job, said, takeover
from status_kit import BUSY, DONE, DOUBLED, FAILED, INTERRUPTED, JOB, POOLED, RUNNING, conditions, facts, holding, seen

RESTARTED = said(phase="Recovering", grid=(), workers=(), step=0, epoch=0, loss=None)


@pytest.mark.parametrize("status", [None, RESTARTED])
def test_an_operators_restart_changes_next_to_nothing(status):
    busy = said(grid=DOUBLED, workers=BUSY, takeovers=(takeover(),), preemptions=2, epoch=7)
    before = seen(busy, plan="p", pods={"": 2})
    earlier = read_status(before)
    after = seen(status, before, earlier=earlier, pods={"": 2}, now=NOW + timedelta(seconds=60))
    assert conditions(after)["Running"]["reason"] == "OperatorRestarted"
    same = [key for key in before if key not in ("conditions",)]
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert holding(after).keys() == holding(before).keys()
    assert all(c["lastTransitionTime"] == at(0) for c in after["conditions"])


def test_counters_grow_over_a_restart():
    before = seen(
        said(takeovers=(takeover(), takeover(stage=0)), preemptions=3, restarts=1), cost=Decimal(2), spec=POOLED
    )
    after = seen(
        said(takeovers=(takeover(victim="w5"),), preemptions=1, restarts=2),
        before,
        earlier=read_status(before),
        cost=Decimal("2.5"),
        now=NOW + timedelta(seconds=9),
        spec=POOLED,
    )
    assert (after["preemptions"], after["takeovers"], after["restarts"], after["restores"]) == (4, 3, 3, 0)
    assert after["cost"]["total"] == "2.5000"


def test_workers_pipelines_and_cost_are_counted():
    spec = job(topology={"stages": 2}, elastic={"maxWorkers": 6}, standby={"workers": 1})
    workers = (*BUSY, ("w2", WorkerState.STANDBY), ("w3", WorkerState.SYNCING), ("w4", WorkerState.LEAVING))
    found = seen(said(workers=workers, grid=((("w0", True), ("w1", False)),), wanted=7), spec=spec)
    assert found["pipelines"] == {"stages": 2, "desired": 1, "ready": 1}
    assert found["workers"] == {"desired": 7, "ready": 5}
    pooled = seen(RUNNING, spec=POOLED, pods={"spot": 2, "fallback": 1})
    assert pooled["cost"] == {"perHour": "4.88", "total": "0.0000"}
    over = seen(RUNNING, spec=POOLED, pods={"spot": 2}, finish=DONE, cost=Decimal(1))
    assert (over["cost"]["perHour"], over["cost"]["total"]) == ("0", "1.0000")


def test_progress_is_what_the_coordinator_says():
    found = seen(RUNNING)["training"]
    assert found == {
        "step": 3,
        "steps": 10,
        "samplesPerSecond": 16.0,
        "loss": 4.0,
        "etaSeconds": 4,
        "lastReportedTime": at(0),
    }
    measured = ((20, {"loss": 2.0, "right": None}), (40, {"loss": 2.5, "right": 0.5}))
    told = seen(said(step=40, evaluations=measured, best_evaluation=20))["training"]["evaluation"]
    assert told == {"step": 40, "metrics": {"loss": 2.5, "right": 0.5}}
    nothing = seen(said(step=0, loss=None, samples_per_second=None, eta_seconds=None))["training"]
    assert nothing == {"step": 0, "steps": 10, "lastReportedTime": at(0)}
    assert "loss" not in seen(said(loss=float("inf")))["training"]


def test_checkpoints_digests_and_plan_stay_when_nothing_new_is_known():
    kept = checkpoints(step=2, age=5.0, restores=3, repeated=7)
    found = seen(said(digests=("a", "b"), checkpoint=kept), plan="{}")
    assert found["checkpoint"] == {"lastStep": 2, "lastTime": at(-5)}
    assert found["restores"] == 3
    later = seen(said(checkpoint=replace(kept, age=9.0)), found)
    assert later["checkpoint"] == found["checkpoint"], "its time is not computed anew"
    assert (found["digests"], found["plan"]) == (["a", "b"], "{}")
    again = seen(None, found)
    assert (again["digests"], again["plan"], again["checkpoint"]["lastStep"]) == (["a", "b"], "{}", 2)
    restarted = seen(said(checkpoint=checkpoints(step=None)), found, earlier=read_status(found))
    assert restarted["checkpoint"] == found["checkpoint"], "another coordinator has not looked"
    assert restarted["restores"] == 3


def test_conditions_of_others_stay():
    other = {"type": "Admitted", "status": "True", "reason": "X", "message": "", "lastTransitionTime": at(-9)}
    assert seen(RUNNING, {"conditions": [other]})["conditions"][-1] == other


@pytest.mark.parametrize(
    ("change", "seconds", "worth"),
    [
        ({}, 1e6, False),
        ({"step": 4}, 14.9, False),
        ({"step": 4, "loss": 3.0, "eta_seconds": 1.0}, 14.9, False),
        ({"step": 4}, 15, True),
        ({"preemptions": 1}, 0, True),
        ({"workers": BUSY[:1]}, 0, True),
        ({"phase": "Restoring"}, 0, True),
        ({"takeovers": (takeover(),)}, 0, True),
    ],
)
def test_when_a_write_is_worth_it(change, seconds, worth):
    old = seen(RUNNING)
    new = seen(said(**change), old, now=NOW + timedelta(seconds=5))
    assert worth_writing(read_status(new), read_status(old), seconds) is worth


GRIDS = st.lists(
    st.tuples(*(st.tuples(st.sampled_from(["w0", "w1", "w2"]), st.booleans()) for _ in range(2))), max_size=3
).map(tuple)


STATUSES = st.none() | st.builds(
    said,
    grid=GRIDS,
    phase=st.sampled_from(["Pending", "Recovering", "Running", "Restoring", "Over"]),
    workers=st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), st.sampled_from(list(WorkerState))).map(
        lambda d: tuple(d.items())
    ),
    step=st.integers(0, 10),
    loss=st.none() | st.floats(),
    samples_per_second=st.none() | st.floats(0, allow_infinity=True),
    eta_seconds=st.none() | st.floats(),
    epoch=st.integers(0, 3),
    preemptions=st.integers(0, 3),
    takeovers=st.lists(st.builds(takeover, stage=st.integers(0, 1)), max_size=2).map(tuple),
    digests=st.sampled_from([(), ("a", "b")]),
)


FACTS = st.builds(
    facts,
    spec=st.sampled_from([None, JOB, POOLED, job(suspend=True)]),
    generation=st.integers(1, 3),
    problems=st.sampled_from([(), ("a",)]),
    warnings=st.sampled_from([(), ("a",)]),
    pods=st.dictionaries(st.sampled_from(["spot", "fallback"]), st.integers(0, 3)),
    cost=st.decimals(0, 1000, places=3),
    finish=st.sampled_from([None, None, None, DONE, FAILED, INTERRUPTED]),
    plan=st.sampled_from([None, "x"]),
)


COUNTERS = ("preemptions", "takeovers", "restores", "restarts")


@given(st.lists(st.tuples(STATUSES, FACTS), min_size=1, max_size=4))
def test_a_status_made_again_does_not_change(history):
    previous = {}
    for second, (status, told) in enumerate(history):
        told = replace(told, now=NOW + timedelta(minutes=second))
        made = job_status(status, read_status(previous), told)
        new = written(made)
        json.dumps(new, allow_nan=False)
        STATUS_VALIDATOR.validate(new)
        assert read_status(new) == made
        later = job_status(status, made, replace(told, now=told.now + timedelta(seconds=30)))
        assert later == made
        assert not worth_writing(later, made, 1e6)
        old = {c["type"]: c for c in previous.get("conditions", ())}
        for c in new["conditions"]:
            before = old.get(c["type"])
            flipped = before is None or before["status"] != c["status"]
            assert c["lastTransitionTime"] == (at(60 * second) if flipped else before["lastTransitionTime"])
        assert all(new[name] >= previous.get(name, 0) for name in COUNTERS)
        assert sum(c["status"] == "True" for c in new["conditions"] if c["type"] in ("Complete", "Failed")) <= 1
        previous = new
