"""Restores: the checkpoint to which a job goes back, the losses after which it does, and when it gives up."""

from typing import Any

import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator.checkpointing.restoring import RESTORE_SECONDS
from bamboo_core.coordinator.checkpointing.saving import AGAIN_SECONDS
from bamboo_core.coordinator.events import Outcome, PreemptionNotice, Tick, WorkerLost
from bamboo_core.coordinator.job_status import status
from bamboo_core.planning.plan import Cell
from checkpoint_world import (
    ORIGIN,
    STARTS,
    gone_back,
    lose_stage,
    made,
    reasons,
    root_of,
    save,
    sent,
    started,
    train,
)
from world import World, silence


def test_a_lost_stage_takes_the_job_back_to_its_checkpoint() -> None:
    world = made(3)
    kept = save(world)
    train(world, 13)
    before = world.plan
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    lose_stage(world)
    world.wait(lambda: world.state.phase == "Restoring")
    assert world.state.phase == "Restoring"
    world.settle()
    plan = world.plan
    assert plan.restore == kept
    assert plan.origin > before.epoch
    restored = status(world.state, world.now).checkpoint
    assert restored is not None
    assert (restored.counts.restored, restored.counts.repeated) == (1, 5)
    assert ("Restoring" in reasons(world), "Restored" in reasons(world)) == (True, True)
    assert world.finish is None


def test_before_its_first_checkpoint_the_job_begins_anew_and_says_what_is_repeated() -> None:
    world = made(3, everySteps=5000)
    train(world, 6)
    world.found = protocol.CheckpointFound(number=0)
    lose_stage(world)
    world.settle()
    assert world.finish is None
    assert (world.plan.first_step, world.plan.restore) == (0, None)
    restored = status(world.state, world.now).checkpoint
    assert restored is not None
    assert (restored.counts.restored, restored.counts.repeated) == (1, 6)


def test_if_none_of_its_checkpoints_can_be_used_the_job_ends() -> None:
    world = made(3, everySteps=5000)
    train(world, 6)
    world.found = protocol.CheckpointFound(number=0, passed=("step 4: its digest differs",))
    lose_stage(world)
    world.settle()
    assert "CheckpointUnusable" in reasons(world)
    assert (world.end.outcome, world.end.reason) == (Outcome.UNRECOVERABLE, "StageLost")
    assert "lost with" in world.end.message


def untrained(checkpoint: dict[str, Any] | None = None) -> World:
    """Return a job whose workers have the first plan and have committed no step."""
    world = World(3, 1, 0, checkpoint=checkpoint)
    while world.state.phase != "Running" or world.pending:
        world.deliver()
    assert (world.state.step, world.finish) == (0, None)
    return world


@pytest.mark.parametrize("checkpoint", [None, {"everySteps": 8}])
def test_a_stage_that_is_lost_before_anything_is_trained_costs_nothing(checkpoint: dict[str, Any] | None) -> None:
    """After the loss of a stage before the first commit, the job begins again, with or without checkpoints."""
    world = untrained(checkpoint)
    world.found = protocol.CheckpointFound(number=0)
    before = world.plan
    lose_stage(world)
    world.wait(lambda: world.plan.origin != before.origin or world.finish is not None)
    assert world.finish is None
    assert (world.state.phase, world.plan.restore, world.plan.first_step) == ("Running", None, 0)
    assert [told.message for told in world.told if told.reason == "Restored"] == ["the job begins again"]
    restoring = next(told.message for told in world.told if told.reason == "Restoring")
    assert restoring.endswith("no step is committed yet, and the job begins anew")
    world.settle()
    assert world.state.step > 0


def test_a_job_that_begins_anew_again_and_again_has_an_end() -> None:
    world = untrained()
    for _ in range(100):
        if world.finish:
            break
        if world.state.phase == "Running" and not world.pending:
            for worker in sorted(world.plan.at(Cell(0, 1)).holders & world.state.workers.keys()):
                world.lost.add(worker)
                world.tell(WorkerLost(worker, "ended", 1))
        world.wait(lambda: False, 20)
    assert world.end.reason == "BackoffLimitExceeded"


def test_a_job_begins_with_what_its_store_has() -> None:
    world = started(STARTS["a"], passed=("the checkpoint of step 9 is damaged",))
    assert world.plan.restore == STARTS["a"]
    assert world.plan.origin == 1
    assert world.state.step >= 6
    assert min(world.state.progress.losses) == 6
    assert [r for r in reasons(world) if r != "WorkerJoined"][:2] == ["CheckpointUnusable", "Restored"]
    shown = status(world.state, world.now).checkpoint
    assert shown is not None
    assert (shown.step, shown.counts.restored, shown.counts.repeated) == (6, 0, 0)


def test_a_damaged_one_leads_to_an_older_one() -> None:
    world = started(STARTS["a"])
    world.found = protocol.CheckpointFound(number=0, checkpoint=STARTS["b"])
    failed = protocol.RestoreFailed(origin=ORIGIN, checkpoint=STARTS["a"], message="torn", damaged=True)
    world.tell(Received("w1", failed))
    assert world.state.phase == "Restoring"
    assert sent(world, protocol.FindCheckpoint)[-1][1].bad == (STARTS["a"],)
    world.settle()
    assert world.plan.restore == STARTS["b"]
    before = len(world.plans)
    world.tell(Received("w1", failed))
    assert (world.state.phase, len(world.plans)) == ("Running", before), "it is of a plan of the past"


def test_one_that_cannot_be_read_now_is_tried_again() -> None:
    world = started(STARTS["a"])
    failed = protocol.RestoreFailed(origin=ORIGIN, checkpoint=STARTS["a"], message="timeout", damaged=False)
    world.tell(Received("w1", failed))
    (told,) = (emit.message for emit in world.told if emit.reason == "RestoreFailed")
    assert told.endswith("timeout; with another spec.checkpoint.storage the job begins at step 0")
    asked = len(sent(world, protocol.FindCheckpoint))
    world.tell(Tick())
    assert len(sent(world, protocol.FindCheckpoint)) == asked, "not at once"
    world.now += AGAIN_SECONDS + 1
    world.tell(Tick())
    assert sent(world, protocol.FindCheckpoint)[-1][1].bad == ()
    world.settle()
    assert world.plan.restore == STARTS["a"]
    assert world.plan.origin > 1


def test_a_store_that_does_not_tell_is_asked_again() -> None:
    world = World(2, 1, 0, checkpoint={"everySteps": 8})
    world.found = protocol.CheckpointFound(number=0, problem="connection refused")
    world.settle()
    silence(world, set(), 3 * AGAIN_SECONDS)
    while world.pending:
        world.deliver()
    for _ in range(3):
        silence(world, set(), AGAIN_SECONDS + 1)
        while world.pending:
            world.deliver()
    assert len(sent(world, protocol.FindCheckpoint)) >= 3
    assert reasons(world).count("CheckpointStoreUnavailable") == 1
    assert world.state.plan is None
    world.found = protocol.CheckpointFound(number=0, checkpoint=STARTS["a"])
    silence(world, set(), AGAIN_SECONDS + 1)
    world.settle()
    assert world.plan.restore == STARTS["a"]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_worker_that_is_to_go_does_not_stay_while_the_job_waits_for_others(wanted: bool) -> None:
    """A waiting job releases a worker under notice at once, since the worker may hold the quota for its successor."""
    world = made(3)
    save(world)
    world.away = 100
    lose_stage(world)
    world.wait(lambda: world.state.phase == "Restoring")
    (going, *_) = world.state.workers
    world.tell(PreemptionNotice(going, 1e9, wanted=wanted))
    assert world.state.workers[going].released
    assert [stop.reason for stop in world.stops] == ["Drained"]


def test_waiting_for_workers_to_go_back_is_no_stall_but_has_an_end() -> None:
    """A restoring job may wait longer than progressDeadlineSeconds for scarce nodes, but only for RESTORE_SECONDS."""
    world = made(2)
    save(world)
    world.away = 100
    for worker in sorted(world.state.workers):
        world.lose(worker)
    world.wait(lambda: world.state.phase == "Restoring")
    world.now += RESTORE_SECONDS - 60
    world.tell(Tick())
    assert world.finish is None
    world.now += 60
    world.tell(Tick())
    assert (world.end.outcome, world.end.reason) == (Outcome.UNRECOVERABLE, "RestoreDeadlineExceeded")
    assert "0 of 2 workers ready" in world.end.message


def test_attempts_that_all_fail_have_an_end_together() -> None:
    """Failed restores share one deadline, although the job is in phase Running before each of them fails."""
    world, _ = gone_back()
    world.found = protocol.CheckpointFound(number=0, checkpoint=world.plan.restore)
    began = world.now
    while world.finish is None and world.now < began + 2 * RESTORE_SECONDS:
        if world.pending:
            world.deliver()
        elif world.state.phase == "Running":
            plan = world.plan
            assert plan.restore is not None
            failed = protocol.RestoreFailed(
                origin=plan.origin, checkpoint=plan.restore, message="a time-out", damaged=False
            )
            world.tell(Received(root_of(world), failed))
            for worker in sorted(world.state.workers):
                world.tell(Received(worker, protocol.Heartbeat(step=8)))
        else:
            world.now += 600.0
            for worker in sorted(world.state.workers):
                world.tell(Received(worker, protocol.Heartbeat(step=8)))
            world.tell(Tick())
    assert world.end.reason == "RestoreDeadlineExceeded"
    assert "a time-out" in world.end.message


def test_a_checkpoint_of_other_data_ends_the_job_with_both() -> None:
    world = World(2, 1, 0, checkpoint={"everySteps": 8})
    other = "data with 400 samples, and the job's have 300 samples"
    world.found = protocol.CheckpointFound(number=0, checkpoint=CheckpointId(step=8, id="a"), other_data=other)
    world.settle()
    assert (world.end.outcome, world.end.reason) == (Outcome.FAILED, "DataMismatch")
    assert world.end.message == (
        f"the checkpoint of step 8 was trained with {other}; with another spec.checkpoint.storage the job begins at "
        "step 0"
    )
