"""The coordinator's decisions on checkpoints: when one is taken, when it is one, and how a job goes on from one."""

from typing import Any

import pytest

from bamboo.checkpoint.layout import part_name
from bamboo.checkpoint.manifest import CheckpointPart
from bamboo.control import protocol
from bamboo.control.channel_events import Received
from bamboo.coordinator.checkpoints import AGAIN_SECONDS, STOP_SECONDS, TIDY_SECONDS, WRITE_SECONDS, first_number
from bamboo.coordinator.events import Interrupted, Outcome, PreemptionNotice, Tick
from bamboo.coordinator.job_status import status
from bamboo.coordinator.restoring import RESTORE_SECONDS
from bamboo.planning.plan import ROOT, Cell, CheckpointId, Plan
from world import World, back, restarted, silence

LAYERS = 8  # of the world's task
ORIGIN = 1  # of a job that has not gone back to a checkpoint
FIRST = first_number("", 0.0) + 1  # of the world's wishes
STARTS = {"a": CheckpointId(step=6, id="a"), "b": CheckpointId(step=3, id="b")}


def made(stages: int = 2, pipelines: int = 1, standby: int = 0, *, steps: int = 10_000, **checkpoint: Any) -> World:
    """A world that trains, at step 1 or a little later."""
    world = World(stages, pipelines, standby, steps=steps, checkpoint={"everySteps": 8, **checkpoint})
    world.settle()
    assert world.state.phase == "Running"
    return world


def plan_of(world: World) -> Plan:
    assert world.state.plan is not None
    return world.state.plan


def root_of(world: World) -> str:
    return plan_of(world).at(ROOT).owner


def train(world: World, step: int) -> None:
    while world.state.step < step:
        world.commit()


def sent(world: World, kind: type) -> list[tuple[str, Any]]:
    return [(worker, message) for worker, message in world.sent if isinstance(message, kind)]


def reasons(world: World) -> list[str]:
    return [event.reason for event in world.told]


def parts(*layers: int) -> tuple[CheckpointPart, ...]:
    return tuple(CheckpointPart(layer=i, file=part_name(i), bytes=10, sha256="0" * 64) for i in layers)


def written(world: World, checkpoint: CheckpointId, *layers: int) -> None:
    message = protocol.PartsWritten(checkpoint=checkpoint, parts=parts(*(layers or range(LAYERS))))
    world.tell(Received(root_of(world), message))


def begin(world: World, step: int = 8, id: str = "a") -> CheckpointId:
    """The commit before that step says that its state is kept."""
    train(world, step - 1)
    checkpoint = CheckpointId(step=step, id=id)
    world.commit((world.state.checkpoints.number, checkpoint))
    return checkpoint


def save(world: World, step: int = 8, id: str = "a") -> CheckpointId:
    checkpoint = begin(world, step, id)
    written(world, checkpoint)
    committer, _ = sent(world, protocol.CommitCheckpoint)[-1]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)))
    return checkpoint


def lose_stage(world: World) -> None:
    """All copies of a stage at once; a third worker lives."""
    plan = plan_of(world)
    for worker in sorted(plan.at(Cell(0, 1)).holders):
        world.lose(worker)
    assert world.state.workers


def test_the_root_is_asked_two_steps_before() -> None:
    world = made()
    train(world, 5)
    assert not sent(world, protocol.TakeCheckpoint)
    train(world, 6)
    ((worker, wish),) = sent(world, protocol.TakeCheckpoint)
    assert (worker, wish.number, wish.at) == (root_of(world), FIRST, 8)
    save(world)
    train(world, 13)
    assert len(sent(world, protocol.TakeCheckpoint)) == 1
    train(world, 14)
    assert [(wish.number, wish.at) for _, wish in sent(world, protocol.TakeCheckpoint)] == [(FIRST, 8), (FIRST + 1, 16)]


def test_the_last_state_is_kept_too() -> None:
    world = made(steps=11)
    save(world)
    train(world, 9)
    assert [wish.at for _, wish in sent(world, protocol.TakeCheckpoint)] == [8, 11]


def test_all_holders_write_but_not_who_is_to_leave() -> None:
    world = made(2, 2, 1)
    train(world, 3)
    plan = plan_of(world)
    holders = [{w for d in range(2) for w in plan.at(Cell(d, s)).holders} for s in range(2)]
    leaving = plan.at(Cell(1, 1)).owner
    world.tell(PreemptionNotice(leaving, 1e9))
    train(world, 6)
    ((_, wish),) = sent(world, protocol.TakeCheckpoint)
    assert all(len(stage) > 1 for stage in wish.writers)
    assert leaving not in {w for stage in wish.writers for w in stage}
    for stage, writers in enumerate(wish.writers):
        plan = plan_of(world)
        owners = {plan.at(Cell(d, stage)).owner for d in range(2)} - {leaving}
        assert set(writers[: len(owners)]) == owners
        assert set(writers) <= holders[stage] | {w for d in range(2) for w in plan.at(Cell(d, stage)).holders}


def test_a_replica_that_is_not_in_step_yet_does_not_write() -> None:
    world = World(2, 1, 0, checkpoint={"everySteps": 1})
    while not sent(world, protocol.TakeCheckpoint):
        world.deliver()
    ((_, wish),) = sent(world, protocol.TakeCheckpoint)
    plan = plan_of(world)
    assert world.state.synced == frozenset()
    assert wish.writers == tuple((plan.at(Cell(0, s)).owner,) for s in range(2))


def test_the_manifest_is_written_when_all_parts_are_durable() -> None:
    world = made()
    checkpoint = begin(world)
    written(world, checkpoint, *range(LAYERS - 1))
    assert not sent(world, protocol.CommitCheckpoint)
    written(world, checkpoint, LAYERS - 1)
    ((worker, request),) = sent(world, protocol.CommitCheckpoint)
    assert (request.checkpoint, [part.layer for part in request.parts]) == (checkpoint, list(range(LAYERS)))
    assert "CheckpointSaved" not in reasons(world)
    world.tell(Received(worker, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    assert "CheckpointSaved" in reasons(world)
    shown = status(world.state, world.now).checkpoint
    assert shown is not None
    assert (shown.step, shown.bytes) == (8, 10 * LAYERS)


def test_parts_may_be_heard_of_before_the_commit() -> None:
    world = made()
    train(world, 7)
    early = CheckpointId(step=8, id="a")
    written(world, early, *range(4))
    written(world, early, *range(4, LAYERS))
    written(world, CheckpointId(step=8, id="other"))
    assert not sent(world, protocol.CommitCheckpoint)
    begin(world)
    assert [request.checkpoint for _, request in sent(world, protocol.CommitCheckpoint)] == [early]


def test_a_failure_may_be_heard_of_before_the_commit() -> None:
    world = made()
    train(world, 7)
    early = CheckpointId(step=8, id="a")
    world.tell(Received("w0", protocol.CheckpointFailed(checkpoint=early, message="no space left")))
    assert "CheckpointAbandoned" not in reasons(world)
    begin(world)
    assert "no space left" in next(e.message for e in world.told if e.reason == "CheckpointAbandoned")
    assert not world.state.checkpoints.writers
    train(world, 14)
    assert [wish.at for _, wish in sent(world, protocol.TakeCheckpoint)] == [8, 16], "not at once: it may fail again"


def test_a_lost_writer_costs_the_checkpoint_and_another_is_taken_at_once() -> None:
    world = made(2, 1, 2)
    checkpoint = begin(world)
    written(world, checkpoint, *range(4))
    gone = world.state.checkpoints.writers[1][0]
    world.lose(gone)
    assert "CheckpointAbandoned" in reasons(world)
    world.tell(Tick())
    wish = sent(world, protocol.TakeCheckpoint)[-1][1]
    assert (wish.number, wish.at) == (FIRST + 1, 9)
    assert gone not in {w for stage in wish.writers for w in stage}


def leaving_writer(world: World) -> tuple[CheckpointId, str, list[int]]:
    """A writer that has to leave while it writes, its stages taken over by others; and its layers."""
    checkpoint = begin(world)
    leaver = world.state.checkpoints.writers[1][0]
    layers = [layer for layer, writer in world.state.checkpoints.dealt.items() if writer == leaver]
    written(world, checkpoint, layers[0])
    world.tell(PreemptionNotice(leaver, 600.0))
    while world.pending or world.state.step < 16:
        world.deliver() if world.pending else world.commit()
    assert not any(leaver in plan_of(world).at(cell).holders for cell in plan_of(world).cells())
    return checkpoint, leaver, layers


def test_who_has_to_leave_may_write_its_share_to_the_end_first() -> None:
    world = made(2, 1, 2, everySteps=8)
    checkpoint, leaver, layers = leaving_writer(world)
    assert "CheckpointAbandoned" not in reasons(world)
    assert not world.state.workers[leaver].released
    written(world, checkpoint, *layers)
    for _ in range(4):
        world.commit()
    assert world.state.workers[leaver].released
    written(world, checkpoint)
    committer = sent(world, protocol.CommitCheckpoint)[-1][0]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    assert world.state.checkpoints.kept == (checkpoint,)


def test_nobody_waits_for_a_share_longer_than_the_notice_lasts() -> None:
    world = made(2, 1, 2, everySteps=8)
    _, leaver, _ = leaving_writer(world)
    silence(world, {leaver}, 1)
    world.now += 600.0
    silence(world, set(), 1)
    assert leaver not in world.state.workers
    assert "CheckpointAbandoned" in reasons(world)


def test_a_writer_that_is_lost_after_it_has_written_its_share_costs_nothing() -> None:
    """Others are still writing theirs."""
    world = made(2, 1, 2)
    checkpoint = begin(world)
    gone = world.state.checkpoints.writers[1][0]
    written(world, checkpoint, *(n for n, writer in world.state.checkpoints.dealt.items() if writer == gone))
    world.lose(gone)
    assert "CheckpointAbandoned" not in reasons(world)
    written(world, checkpoint)
    assert sent(world, protocol.CommitCheckpoint)


def test_a_writer_that_is_lost_after_all_is_written_costs_nothing() -> None:
    world = made(2, 1, 2)
    checkpoint = begin(world)
    written(world, checkpoint)
    asked = sent(world, protocol.CommitCheckpoint)[-1][0]
    world.lose(asked)
    other = sent(world, protocol.CommitCheckpoint)[-1][0]
    assert other != asked
    world.tell(Received(other, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    assert "CheckpointAbandoned" not in reasons(world)
    assert world.state.checkpoints.kept == (checkpoint,)


def test_another_worker_is_asked_for_the_manifest_after_a_while() -> None:
    world = made()
    written(world, begin(world))
    silence(world, set(), AGAIN_SECONDS - 1)
    assert len(sent(world, protocol.CommitCheckpoint)) == 1
    silence(world, set(), 2)
    first, second = (worker for worker, _ in sent(world, protocol.CommitCheckpoint))
    assert first != second


def test_a_root_that_says_nothing_is_asked_again_and_so_is_a_new_one() -> None:
    world = made(2, 1, 2, everySteps=1000)
    train(world, 998)
    old = root_of(world)
    silence(world, set(), AGAIN_SECONDS + 1)
    assert [(w, m.number) for w, m in sent(world, protocol.TakeCheckpoint)] == [(old, FIRST), (old, FIRST)]
    world.tell(PreemptionNotice(old, 1e9))
    while root_of(world) == old:
        if world.pending:
            world.deliver()
        else:
            world.tell(Tick())
    worker, wish = sent(world, protocol.TakeCheckpoint)[-1]
    assert (worker, wish.at) == (root_of(world), 1000)
    assert all(set(writers) <= set(world.state.workers) for writers in wish.writers)
    assert "CheckpointAbandoned" not in reasons(world), "nothing was begun"


def test_what_is_not_written_for_long_is_given_up() -> None:
    world = made()
    begin(world)
    world.now += WRITE_SECONDS
    world.tell(Received("w0", protocol.Heartbeat(step=8)))
    silence(world, set(), 1)
    assert "CheckpointAbandoned" in reasons(world)


def finished(world: World) -> None:
    for cell in plan_of(world).cells():
        message = protocol.CellFinished(cell=cell, digest="0" * 64)
        world.tell(Received(plan_of(world).at(cell).owner, message))


@pytest.mark.parametrize("removed", ["as soon as it is removed", "not for ever", "not for a worker that is gone"])
def test_a_finished_job_waits_for_its_last_checkpoint_and_for_the_removal_of_older_ones(removed: str) -> None:
    world = made(steps=8)
    checkpoint = begin(world)
    finished(world)
    assert world.finish is None
    written(world, checkpoint)
    assert world.finish is None
    committer = sent(world, protocol.CommitCheckpoint)[-1][0]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    assert world.finish is None, "one that is not to be kept any longer may still be there"
    match removed:
        case "as soon as it is removed":
            world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)))
        case "not for ever":
            silence(world, set(), TIDY_SECONDS + 1)
        case "not for a worker that is gone":
            world.lose(committer)
    assert world.finish is not None
    assert world.finish.outcome is Outcome.COMPLETE


@pytest.mark.parametrize("told", ["no commit carries it", "it fails", "its writer is lost"])
def test_a_finished_job_does_not_wait_for_a_checkpoint_that_cannot_be(told: str) -> None:
    world = made(2, 2, steps=8)
    if told == "no commit carries it":
        train(world, 8)
    else:
        begin(world)
    finished(world)
    assert world.finish is None
    if told == "it fails":
        failed = protocol.CheckpointFailed(checkpoint=CheckpointId(step=8, id="a"), message="full")
        world.tell(Received(root_of(world), failed))
    elif told == "its writer is lost":
        world.lose(world.state.checkpoints.writers[1][0])
    else:
        silence(world, set(), 2 * AGAIN_SECONDS + 2)
    assert world.finish is not None
    assert world.finish.outcome is Outcome.COMPLETE


def test_a_lost_stage_takes_the_job_back_to_its_checkpoint() -> None:
    world = made(3)
    kept = save(world)
    train(world, 13)
    before = plan_of(world)
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    lose_stage(world)
    for _ in range(300):
        if world.state.phase == "Restoring":
            break
        world.now += 0.3
        world.deliver() if world.pending else world.tell(Tick())
    assert world.state.phase == "Restoring"
    world.settle()
    plan = plan_of(world)
    assert (plan.origin, plan.restore) == (plan_of(world).origin, kept)
    assert plan.origin > before.epoch
    restored = status(world.state, world.now).checkpoint
    assert restored is not None
    assert (restored.restores, restored.repeated) == (1, 5)
    assert ("Restoring" in reasons(world), "Restored" in reasons(world)) == (True, True)
    assert world.finish is None


def gone_back(*, skipped: bool = False) -> tuple[World, str]:
    """A world that went from step 13 to its checkpoint of step 8, and the worker that was asked for it.

    skipped: the last of these steps left the model as it was.
    """
    world = made(3)
    kept = save(world)
    train(world, 12)
    world.commit(skipped=skipped)
    world.found = None
    lose_stage(world)
    world.settle()
    asked, _ = sent(world, protocol.FindCheckpoint)[-1]
    world.tell(Received(asked, protocol.CheckpointFound(number=world.state.checkpoints.question, checkpoint=kept)))
    return world, asked


def test_the_steps_after_the_checkpoint_are_done_again() -> None:
    world, _ = gone_back()
    assert (world.state.phase, world.state.step) == ("Running", 8)
    assert max(world.state.losses) == 7


def test_a_skipped_step_that_is_done_again_is_progress_and_counts_once() -> None:
    world, _ = gone_back(skipped=True)
    world.settle()
    assert world.state.skips == ()
    train(world, 12)
    world.commit(skipped=True)
    assert (world.state.step, world.state.skips, world.state.skipped_steps) == (13, (12,), 1)


def test_without_a_checkpoint_the_job_ends() -> None:
    world = made(3, everySteps=5000)
    lose_stage(world)
    world.settle()
    assert world.finish is not None
    assert (world.finish.outcome, world.finish.reason) == (Outcome.UNRECOVERABLE, "StageLost")
    assert "lost with" in world.finish.message


def test_a_job_that_keeps_none_says_so() -> None:
    world = World(3, 1, 0)
    world.settle()
    lose_stage(world)
    world.settle()
    assert world.finish is not None
    assert world.finish.message.endswith("not recoverable without a checkpoint")
    assert not world.sent


@pytest.mark.parametrize("own", [False, True])
def test_a_job_that_never_resumes_goes_back_only_to_its_own(own: bool) -> None:
    world = made(3, resume="Never")
    assert plan_of(world).restore is None
    kept = save(world) if own else None
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    lose_stage(world)
    world.settle()
    assert all(question.own for _, question in sent(world, protocol.FindCheckpoint))
    if own:
        assert plan_of(world).restore == kept
    else:
        assert world.finish is not None
        assert world.finish.outcome is Outcome.UNRECOVERABLE


def test_a_job_that_never_resumes_knows_its_own_after_the_coordinators_restart_too() -> None:
    """They are in the store, and only the coordinator before knew of them."""
    world = made(3, resume="Never")
    kept = save(world)
    plan = restarted(world)
    for worker in sorted(plan.worker_ids()):
        back(world, worker, plan)
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    lose_stage(world)
    world.settle()
    assert sent(world, protocol.FindCheckpoint)[-1][1].own
    assert plan_of(world).restore == kept


def started(checkpoint: CheckpointId, **found: Any) -> World:
    """A job whose store has one from the beginning."""
    world = World(2, 1, 0, checkpoint={"everySteps": 8})
    world.found = protocol.CheckpointFound(number=0, checkpoint=checkpoint, **found)
    world.settle()
    return world


def test_a_job_begins_with_what_its_store_has() -> None:
    world = started(STARTS["a"], passed=("the checkpoint of step 9 is damaged",))
    assert plan_of(world).restore == STARTS["a"]
    assert plan_of(world).origin == 1
    assert world.state.step >= 6
    assert min(world.state.losses) == 6
    assert [r for r in reasons(world) if r != "WorkerJoined"][:2] == ["CheckpointUnusable", "Restored"]
    shown = status(world.state, world.now).checkpoint
    assert shown is not None
    assert (shown.step, shown.restores, shown.repeated) == (6, 0, 0)


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    """It may have been on its way since before the channel was cut, or before a checkpoint was found damaged."""
    world = World(2, 1, 0, checkpoint={"everySteps": 8})
    world.found = None
    world.settle()
    first = sent(world, protocol.FindCheckpoint)[-1]
    world.now += AGAIN_SECONDS + 1
    world.tell(Tick())
    second = sent(world, protocol.FindCheckpoint)[-1]
    assert first[0] != second[0], "another worker is asked: it may have the way to the store"
    world.tell(Received(first[0], protocol.CheckpointFound(number=first[1].number)))
    assert world.state.plan is None
    world.tell(Received(second[0], protocol.CheckpointFound(number=second[1].number, checkpoint=STARTS["a"])))
    assert plan_of(world).restore == STARTS["a"]


def test_a_damaged_one_leads_to_an_older_one() -> None:
    world = started(STARTS["a"])
    world.found = protocol.CheckpointFound(number=0, checkpoint=STARTS["b"])
    failed = protocol.RestoreFailed(origin=ORIGIN, checkpoint=STARTS["a"], message="torn", damaged=True)
    world.tell(Received("w1", failed))
    assert world.state.phase == "Restoring"
    assert sent(world, protocol.FindCheckpoint)[-1][1].bad == (STARTS["a"],)
    world.settle()
    assert plan_of(world).restore == STARTS["b"]
    before = len(world.plans)
    world.tell(Received("w1", failed))
    assert (world.state.phase, len(world.plans)) == ("Running", before), "it is of a plan of the past"


def test_one_that_cannot_be_read_now_is_tried_again() -> None:
    world = started(STARTS["a"])
    failed = protocol.RestoreFailed(origin=ORIGIN, checkpoint=STARTS["a"], message="timeout", damaged=False)
    world.tell(Received("w1", failed))
    asked = len(sent(world, protocol.FindCheckpoint))
    world.tell(Tick())
    assert len(sent(world, protocol.FindCheckpoint)) == asked, "not at once"
    world.now += AGAIN_SECONDS + 1
    world.tell(Tick())
    assert sent(world, protocol.FindCheckpoint)[-1][1].bad == ()
    world.settle()
    assert plan_of(world).restore == STARTS["a"]
    assert plan_of(world).origin > 1


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
    assert plan_of(world).restore == STARTS["a"]


def test_what_is_told_of_states_that_are_given_up_is_not_taken() -> None:
    world, asked = gone_back()
    plan, step = plan_of(world), world.state.step
    late = protocol.StepCommitted(step=12, generation=0, loss=9.0, gradient_norm=1.0, microbatches=8, seconds=0.1)
    ended = protocol.CellFinished(cell=Cell(0, 0), digest="0" * 64)
    world.tell(Received(asked, late))
    world.tell(Received(asked, ended))
    assert (world.state.step, world.state.finished) == (step, ())
    world.tell(Received(asked, protocol.PlanApplied(epoch=plan.epoch)))
    owner = plan.owned_by(asked)
    world.commit()
    assert world.state.step == step + (ROOT in owner)


def test_a_job_that_is_suspended_keeps_its_state_first() -> None:
    world = made()
    save(world)
    train(world, 11)
    world.tell(Interrupted(None, "Suspended", "the job is suspended", keep=True))
    _, wish = sent(world, protocol.TakeCheckpoint)[-1]
    assert (wish.at, world.finish) == (12, None)
    save(world, 12, "b")
    assert world.finish is not None
    assert (world.finish.outcome, world.finish.reason) == (Outcome.INTERRUPTED, "Suspended")


@pytest.mark.parametrize("how", ["no checkpoints", "nothing new", "it fails", "it takes too long", "not asked to"])
def test_a_job_that_is_suspended_does_not_wait_in_vain(how: str) -> None:
    world = World(2, 1, 0) if how == "no checkpoints" else made()
    world.settle()
    if how == "no checkpoints":
        train(world, 3)
    else:
        save(world)
    if how not in ("nothing new", "no checkpoints"):
        train(world, 11)
    world.tell(Interrupted(None, "Suspended", "the job is suspended", keep=how != "not asked to"))
    if how == "it fails":
        assert world.finish is None
        failing = begin(world, 12, "b")
        world.tell(Received(root_of(world), protocol.CheckpointFailed(checkpoint=failing, message="full")))
    elif how == "it takes too long":
        begin(world, 12, "b")
        world.now += STOP_SECONDS - 1
        world.tell(Tick())
        assert world.finish is None
        world.now += 1000.0
        world.tell(Tick())
    assert world.finish is not None
    assert world.finish.reason == "Suspended"


def test_a_stage_whose_holders_all_have_notice_is_kept_before_they_go() -> None:
    world = made(2, 1, 0)
    train(world, 3)
    plan = plan_of(world)
    first, *others = plan.at(Cell(0, 1)).holders
    world.tell(PreemptionNotice(first, 1000.0))
    assert not sent(world, protocol.TakeCheckpoint)
    for worker in others:
        world.tell(PreemptionNotice(worker, 1000.0))
    ((_, wish),) = sent(world, protocol.TakeCheckpoint)
    assert wish.at == 4
    save(world, 4)
    world.tell(Tick())
    assert len(sent(world, protocol.TakeCheckpoint)) == 1, "once for the same workers"


def test_waiting_for_workers_to_go_back_is_no_stall_but_has_an_end() -> None:
    """progressDeadlineSeconds is half an hour; nodes may be scarce for longer."""
    world = made(2)
    save(world)
    world.away = 100
    for worker in sorted(world.state.workers):
        world.lose(worker)
    for _ in range(60):
        world.now += 0.3
        world.tell(Tick())
    assert world.state.phase == "Restoring"
    world.now += RESTORE_SECONDS - 60
    world.tell(Tick())
    assert world.finish is None
    world.now += 60
    world.tell(Tick())
    assert world.finish is not None
    assert (world.finish.outcome, world.finish.reason) == (Outcome.UNRECOVERABLE, "RestoreDeadlineExceeded")
    assert "0 of 2 workers ready" in world.finish.message


def test_attempts_that_all_fail_have_an_end_together() -> None:
    """Each of them begins with a plan, as if the job trained again."""
    world, _ = gone_back()
    world.found = protocol.CheckpointFound(number=0, checkpoint=plan_of(world).restore)
    began = world.now
    while world.finish is None and world.now < began + 2 * RESTORE_SECONDS:
        if world.pending:
            world.deliver()
        elif world.state.phase == "Running":
            plan = plan_of(world)
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
    assert world.finish is not None
    assert world.finish.reason == "RestoreDeadlineExceeded"
    assert "a time-out" in world.finish.message


def test_one_that_nobody_knows_of_any_more_is_given_up_and_taken_again() -> None:
    """Only those had heard the commit that are gone now; the new root has committed the step without it."""
    world = made()
    begin(world, 8)
    written(world, CheckpointId(step=8, id="a"), 0, 1)
    message = protocol.StepCommitted(
        step=7, generation=0, loss=1.0, gradient_norm=1.0, microbatches=8, seconds=0.1, checkpoint=None
    )
    world.tell(Received(root_of(world), message))
    assert world.state.checkpoints.writing is None
    assert "CheckpointAbandoned" in reasons(world)
    assert sent(world, protocol.TakeCheckpoint)[-1][1].at == 9


# copies in host memory


def holds(world: World, worker: str, checkpoint: CheckpointId, *layers: int) -> None:
    world.tell(Received(worker, protocol.CopiesHeld(checkpoint=checkpoint, layers=layers)))


def begun_again(world: World, held: dict[int, tuple[int, ...]]) -> tuple[CheckpointId, Plan]:
    """The first plan after a stage was lost. held: by the number of a worker in the first plan, layers of the newest
    checkpoint that it has copies of.
    """
    workers = sorted(plan_of(world).worker_ids())
    checkpoint = save(world)
    world.found = protocol.CheckpointFound(number=0, checkpoint=checkpoint)
    for number, layers in held.items():
        holds(world, workers[number], checkpoint, *layers)
    origin = plan_of(world).origin
    lose_stage(world)
    while plan_of(world).origin == origin:
        world.deliver() if world.pending else world.tell(Tick())
    return checkpoint, plan_of(world)


def test_a_plan_that_goes_back_names_who_has_copies() -> None:
    world = made(4, 1)
    checkpoint, plan = begun_again(world, {0: (0, 1), 1: (2,), 2: (4, 5), 3: (6,)})
    lost, living = world.lost, sorted(plan.worker_ids())
    assert (plan.restore, plan.moved, plan.reason) == (checkpoint, False, "Started")
    assert {w for holders in plan.sources for w in holders} <= set(living) - lost
    assert plan.sources[4:7] == (("w2",), ("w2",), ("w3",))
    assert plan.sources[2:4] == ((), ()), "who had copies of these is lost: they are read from the store"
    world.settle()
    assert plan_of(world).sources == ()
    assert "3 of 8 layers from memory" in next(e.message for e in world.told if e.reason == "RolledBack")
    train(world, 12)


def test_without_copies_a_plan_that_goes_back_names_nobody() -> None:
    world = made(4, 1)
    _, plan = begun_again(world, {1: (2,)})
    assert plan.sources == ()
    world.settle()
    assert "RolledBack" not in reasons(world)


def test_a_loss_before_all_have_begun_is_met_by_another_plan_from_the_same_checkpoint() -> None:
    world = made(4, 1)
    checkpoint, plan = begun_again(world, {2: (4, 5), 3: (6,)})
    world.lose("w2")
    again = plan_of(world)
    assert (again.origin, again.restore, again.reason) == (plan.epoch + 1, checkpoint, "RollingBack")
    assert again.sources[4:7] == ((), (), ("w3",))
    world.lose("w3")
    assert (plan_of(world).origin, plan_of(world).sources) == (again.epoch + 1, ())
    world.settle()
    assert world.state.checkpoints.counts.repeated == 0, "it was never beyond that state since"
    assert sum(world.state.checkpoints.counts.restores.values()) == 1
    train(world, 12)


def test_copies_of_what_is_not_the_newest_checkpoint_any_more_are_dropped() -> None:
    world = made()
    old = save(world, 8)
    holds(world, "w0", old, 0, 1)
    holds(world, "w1", old, 2)
    new = begin(world, 16, "b")
    holds(world, "w0", new, 0, 1)
    assert not sent(world, protocol.DropCopies)
    written(world, new)
    committer, _ = sent(world, protocol.CommitCheckpoint)[-1]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=new)))
    drop = protocol.DropCopies(checkpoints=(old,))
    assert sent(world, protocol.DropCopies) == [("w0", drop), ("w1", drop)]
    assert set(world.state.checkpoints.copies) == {new}


def test_copies_of_a_checkpoint_that_is_given_up_are_dropped_and_those_of_the_one_before_are_not() -> None:
    world = made()
    old = save(world, 8)
    holds(world, "w0", old, 0, 1)
    new = begin(world, 16, "b")
    holds(world, "w0", new, 0, 1)
    world.tell(Received("w1", protocol.CheckpointFailed(checkpoint=new, message="no space left")))
    assert sent(world, protocol.DropCopies) == [("w0", protocol.DropCopies(checkpoints=(new,)))]
    assert set(world.state.checkpoints.copies) == {old}


def test_made_up_copies_are_not_believed() -> None:
    world = made()
    holds(world, "w0", CheckpointId(step=8, id="a"), 0, LAYERS)
    assert world.state.checkpoints.copies == {}
    for step in range(100):
        holds(world, "w0", CheckpointId(step=step, id="a"), 0)
    assert len(world.state.checkpoints.copies) <= 4
