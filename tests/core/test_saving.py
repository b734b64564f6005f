"""The coordinator's checkpoints: when it requests one, which workers write the parts, and when one is complete."""

import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator.checkpointing.saving import (
    AGAIN_SECONDS,
    STOP_SECONDS,
    TIDY_SECONDS,
)
from bamboo_core.coordinator.events import Interrupted, Outcome, PreemptionNotice, Tick
from bamboo_core.coordinator.job_status import status
from bamboo_core.planning.plan import Cell
from checkpoint_world import FIRST, LAYERS, begin, finished, made, reasons, root_of, save, sent, train, written
from world import World, silence


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


def test_all_holders_write_but_not_who_is_to_leave() -> None:
    world = made(2, 2, 1)
    train(world, 3)
    plan = world.plan
    holders = [{w for d in range(2) for w in plan.at(Cell(d, s)).holders} for s in range(2)]
    leaving = plan.at(Cell(1, 1)).owner
    world.tell(PreemptionNotice(leaving, 1e9))
    train(world, 6)
    ((_, wish),) = sent(world, protocol.TakeCheckpoint)
    assert all(len(stage) > 1 for stage in wish.writers)
    assert leaving not in {w for stage in wish.writers for w in stage}
    for stage, writers in enumerate(wish.writers):
        plan = world.plan
        owners = {plan.at(Cell(d, stage)).owner for d in range(2)} - {leaving}
        assert set(writers[: len(owners)]) == owners
        assert set(writers) <= holders[stage] | {w for d in range(2) for w in plan.at(Cell(d, stage)).holders}


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


def leaving_writer(world: World) -> tuple[CheckpointId, str, list[int]]:
    """Give a writer notice, so that others take its stages. Return the checkpoint, the writer and its layers."""
    checkpoint = begin(world)
    leaver = world.state.checkpoints.writers[1][0]
    layers = [layer for layer, writer in world.state.checkpoints.dealt.items() if writer == leaver]
    written(world, checkpoint, layers[0])
    world.tell(PreemptionNotice(leaver, 600.0))
    while world.pending or world.state.step < 16:
        world.deliver() if world.pending else world.commit()
    assert not any(leaver in world.plan.at(cell).holders for cell in world.plan.cells())
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
    assert world.outcome is Outcome.COMPLETE


def test_a_job_that_is_suspended_keeps_its_state_first() -> None:
    world = made()
    save(world)
    train(world, 11)
    world.tell(Interrupted("Suspended", "the job is suspended"))
    _, wish = sent(world, protocol.TakeCheckpoint)[-1]
    assert (wish.at, wish.pause, world.finish) == (12, True, None)
    save(world, 12, "b")
    assert (world.end.outcome, world.end.reason) == (Outcome.INTERRUPTED, "Suspended")


@pytest.mark.parametrize("how", ["no checkpoints", "nothing new", "it fails", "it takes too long"])
def test_a_job_that_is_suspended_does_not_wait_in_vain(how: str) -> None:
    world = World(2, 1, 0) if how == "no checkpoints" else made()
    world.settle()
    if how == "no checkpoints":
        train(world, 3)
    else:
        save(world)
    if how not in ("nothing new", "no checkpoints"):
        train(world, 11)
    world.tell(Interrupted("Suspended", "the job is suspended"))
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
    assert world.end.reason == "Suspended"


def test_a_stage_whose_holders_all_have_notice_is_kept_before_they_go() -> None:
    world = made(2, 1, 0)
    train(world, 3)
    plan = world.plan
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
