"""A BambooJob's conditions: their rules, and their messages about grids, queues and operator restarts."""

from dataclasses import replace
from datetime import timedelta

import pytest

from bamboo_core.coordinator.events import SlowWorker, WorkerState
from bamboo_core.job.manifest_warnings import warnings
from bamboo_operator.pods.starting import StartupProblem
from operator_kit import NOW, at, job, said
from status_kit import BUSY, DONE, DOUBLED, FAILED, INTERRUPTED, POOLED, RUNNING, conditions, holding, seen

ALL = [
    *["Accepted", "WorkersReady", "WorkersUpdated", "Running", "Degraded", "Protected", "Straggling"],
    *["BudgetShort", "Suspended", "Restoring", "FallbackActive", "Complete", "Failed"],
]


SLOW = SlowWorker(worker="w1", pipeline=0, stage=1, seconds=0.2, usual=0.1, sentence="w1 takes 200 ms")
PENDING = said(phase="Pending", grid=(), workers=(), step=0, loss=None)


@pytest.mark.parametrize(
    ("status", "more", "state", "holds"),
    [
        (None, {"spec": None, "problems": ("spec.task: missing",)}, "Invalid", {}),
        (None, {}, "Pending", {"Accepted": "Accepted"}),
        (None, {"warnings": ("x",)}, "Pending", {"Accepted": "AcceptedInPart"}),
        (PENDING, {}, "Pending", {"Accepted": "Accepted"}),
        (
            RUNNING,
            {},
            "Running",
            {"Accepted": "Accepted", "WorkersReady": "WorkersReady", "Running": "Training"},
        ),
        (
            said(grid=DOUBLED, workers=BUSY[:1]),
            {},
            "Degraded",
            {"Accepted": "Accepted", "Running": "Training", "Degraded": "WorkersMissing"},
        ),
        (
            said(grid=((("w0", True), ("w1", False)),)),
            {},
            "Degraded",
            {"Accepted": "Accepted", "WorkersReady": "WorkersReady", "Running": "Training", "Degraded": "Unprotected"},
        ),
        (
            said(grid=((("w0", False), ("w1", False)),)),
            {"spec": job(redundancy={"mode": "None"})},
            "Running",
            {"Accepted": "Accepted", "WorkersReady": "WorkersReady", "Running": "Training"},
        ),
        (
            said(slow=(SLOW,)),
            {},
            "Running",
            {
                "Accepted": "Accepted",
                "WorkersReady": "WorkersReady",
                "Running": "Training",
                "Straggling": "StragglerFound",
            },
        ),
        (RUNNING, {"spec": job(suspend=True)}, "Suspended", {"Accepted": "Accepted", "Suspended": "Suspended"}),
        (
            said(phase="Restoring"),
            {},
            "Restoring",
            {"Accepted": "Accepted", "WorkersReady": "WorkersReady", "Restoring": "Restoring"},
        ),
        (
            RUNNING,
            {"spec": POOLED, "pods": {"spot": 1, "fallback": 1}},
            "Running",
            {
                "Accepted": "Accepted",
                "WorkersReady": "WorkersReady",
                "Running": "Training",
                "FallbackActive": "FallbackPool",
            },
        ),
        (said(phase="Over"), {"finish": DONE}, "Complete", {"Accepted": "Accepted", "Complete": "Complete"}),
        (said(phase="Over"), {"finish": FAILED}, "Failed", {"Accepted": "Accepted", "Failed": "TaskFailed"}),
        (
            None,
            {"finish": INTERRUPTED, "spec": job(suspend=True)},
            "Suspended",
            {"Accepted": "Accepted", "Suspended": "Suspended"},
        ),
        (
            RUNNING,
            {"problems": ("bad edit",)},
            "Degraded",
            {"WorkersReady": "WorkersReady", "Running": "Training", "Degraded": "SpecNotFollowed"},
        ),
    ],
)
def test_state_and_conditions_follow_from_what_is_seen(status, more, state, holds):
    found = seen(status, **more)
    assert found["state"] == state
    assert {kind: reason for kind, reason in holding(found).items() if kind != "Protected"} == holds
    assert [c["type"] for c in found["conditions"]] == ALL
    assert all(c["reason"] and c["message"] and c["lastTransitionTime"] == at(0) for c in found["conditions"])


def test_a_job_that_does_not_follow_its_newest_manifest_is_degraded():
    found = conditions(seen(said(), refused="spec.task: is fixed"))
    assert (found["Accepted"]["reason"], found["Accepted"]["message"]) == ("ChangeRefused", "spec.task: is fixed")
    assert (found["Degraded"]["status"], found["Degraded"]["reason"]) == ("True", "SpecNotFollowed")
    found = conditions(seen(said(), problems=("spec.training: wrong",)))
    assert (found["Accepted"]["reason"], found["Degraded"]["reason"]) == ("InvalidSpec", "SpecNotFollowed")
    before = seen(said())
    left = conditions(seen(None, before, problems=("spec.training: wrong",), unattended=True))
    assert (left["Running"]["status"], left["Degraded"]["reason"]) == ("True", "Unattended")
    assert (left["Protected"]["status"], left["Protected"]["reason"]) == ("False", "Unattended")


@pytest.mark.parametrize("status", [None, said(phase="Recovering")])
@pytest.mark.parametrize(("pods", "ready"), [(2, ("True", "WorkersReady")), (1, ("False", "WorkersMissing"))])
def test_an_operator_that_takes_over_vouches_for_nobody_whom_it_has_not_heard(status, pods, ready):
    """Until workers report, a new operator sets Protected to False; it sets WorkersReady at once, from their pods."""
    before = seen(said(), pods={"": 2})
    assert {"Protected", "WorkersReady"} <= holding(before).keys()
    for found in (after := seen(status, before, pods={"": pods}), seen(status, after, pods={"": pods})):
        told = conditions(found)
        assert (told["Protected"]["status"], told["Protected"]["reason"]) == ("False", "OperatorRestarted")
        assert (told["WorkersReady"]["status"], told["WorkersReady"]["reason"]) == ready
        assert told["Running"]["status"] == "True"


def test_messages_name_what_is_wrong():
    degraded = conditions(seen(said(grid=DOUBLED, workers=BUSY[:1])))["Degraded"]["message"]
    assert degraded.startswith("stage 0 of pipeline 0 runs on w0, which runs another stage, too; stage 0 of pipeline 0")
    assert degraded.endswith("; and 1 more")
    assert conditions(seen(said(workers=BUSY[:1])))["WorkersReady"]["message"] == "1 of 2 workers are ready"
    invalid = conditions(seen(spec=None, problems=("a: x", "b: y")))["Accepted"]
    assert (invalid["status"], invalid["reason"], invalid["message"]) == ("False", "InvalidSpec", "a: x; b: y")


def test_an_end_is_final():
    done = seen(said(phase="Over"), finish=DONE)
    after = seen(None, done, now=NOW + timedelta(hours=1))
    assert conditions(after)["Complete"] == conditions(done)["Complete"]
    assert (after["state"], after["workers"]["desired"]) == ("Complete", 0)
    assert seen(RUNNING, done, finish=FAILED)["state"] == "Complete"
    failed = seen(said(phase="Over"), finish=FAILED)
    assert seen(None, failed)["state"] == "Failed"


# grids that are chosen


@pytest.mark.parametrize("topology", [{}, {"stages": 3}])
@pytest.mark.parametrize("objective", ["Throughput", "Value"])
def test_where_the_grid_is_chosen_no_other_one_is_missed(objective, topology):
    """A job is not degraded on a grid that the coordinator chose (2 pipelines, 3 stages), though maxWorkers is 9."""
    rows = tuple(tuple((f"w{pipeline * 3 + stage}", True) for stage in range(3)) for pipeline in range(2))
    spec = job(topology=topology, elastic={"objective": objective, "maxWorkers": 9})
    found = seen(said(grid=rows), spec=spec)
    assert conditions(found)["Degraded"]["status"] == "False"
    assert (found["pipelines"]["desired"], found["pipelines"]["ready"]) == (2, 2)


def test_a_job_of_which_no_grid_fits_says_so():
    why = "no grid of 2 workers fits in devices with 16.0 GB; a grid of 4 workers fits"
    found = conditions(seen(replace(PENDING, grid_choice=why), spec=job(elastic={"maxWorkers": 8})))
    assert (found["Running"]["status"], found["Running"]["reason"], found["Running"]["message"]) == (
        "False",
        "NoGridFits",
        why,
    )


def test_a_restarted_operator_wants_as_many_workers_as_the_one_before():
    """The job may have eight workers; the coordinator wants two, as no more are worth their price."""
    pool = [{"name": "spot", "pricePerHour": "1"}]
    spec = job(topology=None, elastic={"objective": "Value", "maxWorkers": 8}, nodePools=pool)
    before = seen(said(wanted=2, workers=BUSY), spec=spec, pods={"spot": 2})
    after = seen(None, previous=before, spec=spec, pods={"spot": 2})
    for status in (before, after):
        assert conditions(status)["WorkersReady"]["status"] == "True", conditions(status)["WorkersReady"]
        assert status["workers"]["desired"] == 2


@pytest.mark.parametrize(("workers", "reason"), [(BUSY, "WorkersReady"), (BUSY[:1], "WaitingForQuota")])
def test_what_a_job_waits_for_in_its_queue_is_told_whether_or_not_it_trains_with_all_it_needs(
    workers: tuple[tuple[str, WorkerState], ...], reason: str
) -> None:
    waits = StartupProblem("WaitingForQuota", "2 worker(s) wait for quota")
    found = conditions(seen(said(workers=workers), startup_problems=(waits,)))["WorkersReady"]
    assert found["reason"] == reason
    assert found["message"].endswith("; 2 worker(s) wait for quota")


def test_who_applies_a_manifest_reads_what_may_surprise_in_its_condition() -> None:
    """The Accepted condition's message contains the manifest's warnings, since kubectl apply prints none of them."""
    spec = job(spread={"policy": "SingleZone"})
    found = conditions(seen(PENDING, spec=spec, surprises=tuple(warnings(spec))))["Accepted"]
    assert (found["status"], found["reason"]) == ("True", "Accepted")
    assert "spec.spread.policy SingleZone without spec.checkpoint: the job ends if" in found["message"]


def test_a_queue_without_effect_is_a_warning() -> None:
    found = conditions(seen(said(), spec=job(queue={"name": "q"}), unmanaged="spec.queue: no effect"))["Accepted"]
    assert (found["status"], found["reason"], found["message"]) == ("True", "AcceptedInPart", "spec.queue: no effect")
