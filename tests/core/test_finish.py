"""The checkpoint of a job's last state: its writers, and the job's completion if the checkpoint fails."""

from dataclasses import replace

import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator import finish
from bamboo_core.coordinator.checkpointing.saving import AGAIN_SECONDS, WRITE_SECONDS
from bamboo_core.coordinator.events import AbandonReason, Outcome
from checkpoint_world import begin, finished, made, reasons, root_of, sent, train, written
from world import World, silence


def asked(world: World) -> dict[str, protocol.KeepLastState]:
    """Return the latest KeepLastState request to each worker."""
    return dict(sent(world, protocol.KeepLastState))


def committed(world: World, checkpoint: CheckpointId) -> None:
    committer, request = sent(world, protocol.CommitCheckpoint)[-1]
    assert request.checkpoint == checkpoint
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)))
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)))


def kept(world: World) -> CheckpointId:
    """Let the workers write and commit the last state, which completes the job. Return its CheckpointId."""
    assert world.finish is None
    requests = asked(world)
    checkpoint = next(iter(requests.values())).checkpoint
    assert checkpoint.step == world.spec.training.steps
    assert {w for request in requests.values() for stage in request.writers for w in stage} == requests.keys()
    written(world, checkpoint)
    committed(world, checkpoint)
    assert (world.end.outcome, world.end.message) == (Outcome.COMPLETE, f"all {checkpoint.step} steps are done")
    return checkpoint


def test_it_is_kept_after_the_one_before_that_is_still_being_written_at_the_end() -> None:
    world = made(2, 2, steps=11)
    slow = begin(world)
    train(world, 11)
    finished(world)
    assert not asked(world), "one after the other"
    written(world, slow)
    committed(world, slow)
    last = kept(world)
    assert [one.step for one in world.state.checkpoints.kept] == [11, 8]
    assert last.id != slow.id
    assert "CheckpointAbandoned" not in reasons(world)


def test_all_who_have_finished_a_stage_share_its_layers() -> None:
    world = made(2, 2, steps=8)
    train(world, 8)
    finished(world)
    plan = world.plan
    owners = tuple(tuple(sorted(plan.pipelines[d][s].owner for d in range(2))) for s in range(2))
    (writers,) = {request.writers for request in asked(world).values()}
    assert tuple(tuple(sorted(stage)) for stage in writers) == owners
    assert set(world.state.checkpoints.dealt.values()) == {w for stage in owners for w in stage}


def test_who_is_not_heard_of_is_asked_again() -> None:
    world = made(2, 2, steps=8)
    train(world, 8)
    finished(world)
    first = len(sent(world, protocol.KeepLastState))
    checkpoint = next(iter(asked(world).values())).checkpoint
    dealt = world.state.checkpoints.dealt
    late = dealt[0]
    written(world, checkpoint, *(layer for layer, writer in dealt.items() if writer != late))
    silence(world, set(), AGAIN_SECONDS + 1)
    assert [worker for worker, _ in sent(world, protocol.KeepLastState)[first:]] == [late]
    kept(world)


@pytest.mark.parametrize("told", [AbandonReason.STORE_FAILED, AbandonReason.WRITER_LOST, AbandonReason.TOO_SLOW])
def test_it_is_tried_once_more_and_then_the_job_is_complete_without_it(told: AbandonReason) -> None:
    world = made(2, 2, steps=8)
    begin(world)
    finished(world)

    def fail() -> None:
        c = world.state.checkpoints
        assert c.writing is not None
        match told:
            case AbandonReason.STORE_FAILED:
                failed = protocol.CheckpointFailed(checkpoint=c.writing, message="no space left")
                world.tell(Received(root_of(world), failed))
            case AbandonReason.WRITER_LOST:
                world.lose(c.writers[1][-1])
            case AbandonReason.TOO_SLOW:
                world.now += WRITE_SECONDS
                silence(world, set(), 1)

    fail()
    assert world.finish is None
    assert asked(world)
    fail()
    assert world.outcome is Outcome.COMPLETE
    assert world.end.message == "all 8 steps are done; there is no checkpoint of the last state"
    assert world.state.checkpoints.counts.abandoned == {told: 2}
    assert reasons(world).count("CheckpointAbandoned") == 2


def test_a_job_without_checkpoints_keeps_its_last_state_where_it_is_to() -> None:
    world = World(2, 1, 0, steps=4)
    world.state = replace(world.state, terms=replace(world.state.terms, last_state="file:///out"))
    assert world.state.terms.welcome().last_state == "file:///out"
    world.settle()
    train(world, 4)
    finished(world)
    last = kept(world)
    assert finish.last_checkpoint(world.state) == last
