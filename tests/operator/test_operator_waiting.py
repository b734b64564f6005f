"""A job's pods: the operator waits for none forever, creates none twice, and counts each pod's end only once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bamboo_core.control.protocol import ChannelClosed, PeerDown, WorkerReady
from bamboo_core.coordinator.events import WorkerLost
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.job.status import BambooJobStatus, PlanRecord
from bamboo_operator.kube.objects import JobIdentity
from bamboo_operator.status.writer import StatusWriter
from operator_kit import job
from pod_controller_kit import Job, Place


def read_record(text: str | None) -> PlanRecord:
    return BambooJobStatus(plan=text).plan_record


pytest_plugins = ["pod_controller_kit"]


def copied(place: Place) -> Place:
    """Return another API server with the same pods, for an operator that takes over or for the resumed job."""
    other = Place()
    for pod in place.pods.values():
        other.put(pod, pod["metadata"]["uid"])
    other.made = place.made
    return other


# gone before anybody looks


async def test_a_pod_that_goes_when_a_coordinator_begins_is_replaced(begin: Callable[..., Job]) -> None:
    """A job that is suspended and resumed at once may have a pod that ends while its coordinator starts."""
    first = Place()
    await begin(first).reconciles()
    place = copied(first)
    resumed = begin(place)
    place.take("tiny-w0")  # the coordinator is made, and its loop has not begun
    await resumed.reconciles()
    assert sorted(place.pods) == ["tiny-w1", "tiny-w2"]
    assert (resumed.controller.view().adding, resumed.runner.state.membership.requested) == (0, 2)


@pytest.mark.parametrize("answered", [True, False])
async def test_a_pod_of_which_no_watch_has_told_is_replaced_when_it_goes(
    begin: Callable[..., Job], answered: bool
) -> None:
    """kopf merges quick events of one object, so the watch may report only the end of a pod."""
    place = Place()
    place.shown = False
    started = begin(place)
    if not answered:
        place.meanwhile = lambda: place.take("tiny-w0") if place.made == 1 else None
    await started.reconciles()
    if answered:
        assert sorted(place.pods) == ["tiny-w0", "tiny-w1"]
        place.take("tiny-w0")
        await started.reconciles()
    assert sorted(place.pods) == ["tiny-w1", "tiny-w2"]
    assert (started.controller.view().adding, started.runner.state.membership.requested) == (0, 2)


# on their way out


@pytest.mark.parametrize("resumed", [True, False])
async def test_a_pod_that_never_goes_is_replaced(begin: Callable[..., Job], resumed: bool) -> None:
    """Nothing ends a pod on a node that hangs, so the operator replaces the pod without waiting for its end."""
    first = Place()
    await begin(first).reconciles()
    place = copied(first)
    if not resumed:
        place.mark("tiny-w0")
    started = begin(place, resumed=resumed)
    await started.reconciles()
    if resumed:
        place.mark("tiny-w0")
        await started.reconciles()
        assert sorted(place.pods) == ["tiny-w0", "tiny-w1"], "it may still come"
        started.runner.state = _running(started)
    await started.ticks(45)
    await started.reconciles()
    assert sorted(place.pods) == ["tiny-w0", "tiny-w1", "tiny-w2"]


def _running(started: Job) -> CoordinatorState:
    return replace(started.runner.state, course=replace(started.runner.state.course, phase="Running"))


@pytest.mark.parametrize("told", [True, False])
async def test_who_is_left_of_the_training_before_does_not_come_in(begin: Callable[..., Job], told: bool) -> None:
    """A worker that missed the suspension stays lost if it joins. told: the watch, not the status, shows the loss."""
    first = Place()
    suspended = begin(first)
    await suspended.reconciles()
    suspended.train()
    place = copied(first)
    if told:
        place.mark("tiny-w1")
        place.take("tiny-w0")
    resumed = begin(place, known_lost=frozenset() if told else frozenset({"tiny-w0", "tiny-w1"}))
    await resumed.reconciles()
    assert "tiny-w1" in read_record(resumed.plan_record()).lost
    resumed.hear("tiny-w1", plan=suspended.runner.state.plan)
    assert resumed.runner.state.phase == "Pending"
    living = [name for name, pod in place.pods.items() if "deletionTimestamp" not in pod["metadata"]]
    assert {"tiny-w2", "tiny-w3"} <= set(living), "it does not wait for their end"


# another operator


async def test_workers_that_cannot_reach_a_restarted_operator_are_left_alone(begin: Callable[..., Job]) -> None:
    """The workers train on; the operator deletes no pod, and reports WorkerSilent, so that the user sees it."""
    first = Place()
    await begin(first).reconciles()
    place = copied(first)
    for name in place.pods:
        place.run(name, 36_000)
    restarted = begin(place, resumed=True)
    await restarted.reconciles(700)
    assert place.deleted == []
    assert restarted.runner.state.phase == "Recovering"
    assert "WorkerSilent" in restarted.problems()


async def test_another_operator_is_told_of_every_worker_that_was_declared_lost(begin: Callable[..., Job]) -> None:
    first = Place()
    started = begin(first, standby={"workers": 1})
    await started.reconciles()
    started.train()
    started.runner.handle(WorkerLost("tiny-w2", "no heartbeat for 5.1 s"))
    lost = read_record(started.plan_record()).lost
    assert lost == {"tiny-w2"}
    place = copied(first)
    restarted = begin(place, resumed=True, known_lost=lost, standby={"workers": 1})
    await restarted.reconciles()
    assert restarted.runner.state.membership.requested == 2
    await restarted.reconciles(15)
    assert place.deleted == ["tiny-w2"], "nobody else removes it"


@pytest.mark.parametrize("joined", [True, False], ids=["told to leave", "never joined"])
async def test_a_worker_that_goes_by_order_while_operators_change_was_not_preempted(
    begin: Callable[..., Job], joined: bool
) -> None:
    """One operator deletes a worker's pod, and another begins before it is gone: that is no preemption."""
    first = Place()
    first.kubelets = False
    started = begin(first, standby={"workers": 1})
    await started.reconciles()
    if not joined:
        spare = first.pods.pop("tiny-w2")
        started.train()
        first.pods["tiny-w2"] = spare
    else:
        started.train()
    started.edit(job(standby={"workers": 0}))
    for _ in range(8):
        await started.reconciles()
        started.commit()
    await started.reconciles(15)
    assert first.deleted == ["tiny-w2"]
    place = copied(first)
    restarted = begin(place, resumed=True, known_lost=read_record(started.plan_record()).lost)
    await restarted.reconciles()
    place.take("tiny-w2")
    await restarted.ticks(0.2)
    assert restarted.runner.state.membership.preemptions == 0


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_worker_that_goes_after_a_notice_while_operators_change_was_preempted_once(
    begin: Callable[..., Job], comes_back: bool
) -> None:
    """The earlier operator counts the preemption when somebody deletes the pod, and its successor does not."""
    first = Place()
    started = begin(first, standby={"workers": 1})
    await started.reconciles()
    started.train()
    first.mark("tiny-w1")
    await started.ticks(0.2)
    assert started.runner.state.membership.preemptions == 1
    record = started.plan_record()
    place = copied(first)
    restarted = begin(
        place,
        resumed=True,
        known_lost=read_record(record).lost,
        counted=read_record(record).counted,
        standby={"workers": 1},
    )
    await restarted.reconciles()
    for worker in ("tiny-w0", "tiny-w1", "tiny-w2"):
        if comes_back or worker != "tiny-w1":
            restarted.hear(worker, WorkerReady(), plan=started.runner.state.plan)
    await restarted.ticks(0.2)
    assert "tiny-w1" in read_record(restarted.plan_record()).counted
    place.take("tiny-w1")
    await restarted.ticks(0.2)
    assert restarted.runner.state.membership.preemptions == 0


# made once


async def test_a_pod_that_was_made_without_an_answer_counts_once(begin: Callable[..., Job]) -> None:
    place = Place()
    started = begin(place)
    place.unanswered = 1
    await started.reconciles(count=8)
    assert sorted(place.pods) == ["tiny-w0", "tiny-w1"]
    started.train()
    place.take("tiny-w0")
    await started.reconciles()
    assert sorted(place.pods) == ["tiny-w1", "tiny-w2"]


# pods that ended before or after their workers' channels closed


async def missed(job: Job, name: str) -> None:
    """Close a worker's channel and its link to tiny-w0, so that the coordinator counts the worker as gone."""
    job.hear("tiny-w0", PeerDown(peer=name))
    job.runner.handle(ChannelClosed(name))
    assert name in job.runner.state.membership.gone
    await job.reconciles()


async def test_a_pod_that_we_delete_because_its_worker_was_missed_was_not_taken_away(
    begin: Callable[..., Job],
) -> None:
    """Only a pod that others delete, or that ends with its node, counts as disrupted."""
    place = Place()
    job = begin(place, standby={"workers": 1})
    await job.reconciles()
    job.train()
    await missed(job, "tiny-w1")
    await job.reconciles(15.0)
    assert place.deleted == ["tiny-w1"]
    await job.ticks(0.2)
    assert not job.runner.state.worker_ends.since_commit["tiny-w1"].disrupted
    assert "tiny-w1" not in job.runner.state.worker_ends.unexplained
    await missed(job, "tiny-w2")
    place.take("tiny-w2")
    await job.ticks(0.2)
    assert job.runner.state.worker_ends.since_commit["tiny-w2"].disrupted


async def test_an_operator_that_comes_later_does_not_count_again_what_ended_before_training(
    begin: Callable[..., Job],
) -> None:
    """Pods of failed workers stay, for their logs; a later operator does not count these failures again."""
    place = Place()
    first = begin(place)
    await first.reconciles()
    assert first.plan_record() is None
    place.end("tiny-w1", 3)
    await first.ticks(0.2)
    assert (first.runner.state.worker_ends.restarts, first.runner.state.plan) == (1, None)
    written, job_id = {"plan": first.plan_record()}, JobIdentity(("default", "tiny"), "uid")
    status = StatusWriter(job_id, written, place)  # type: ignore[arg-type]
    assert status.plan is None, "no worker trains"
    second = begin(place, known_lost=status.written.plan_record.lost)
    await second.reconciles()
    place.end("tiny-w0", 3)  # while it works
    await second.ticks(0.2)
    assert second.runner.state.worker_ends.restarts == 1, "its own; the first one is in the status already"
    assert "tiny-w1" in place.pods
