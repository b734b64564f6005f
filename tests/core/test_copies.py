"""Copies of checkpoints in workers' memory: the workers from which plans restore layers, and removal of old copies."""

import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Plan
from checkpoint_world import LAYERS, begin, lose_stage, made, save, sent, train, written
from world import World


def holds(world: World, worker: str, checkpoint: CheckpointId, *layers: int) -> None:
    world.tell(Received(worker, protocol.CopiesHeld(checkpoint=checkpoint, layers=layers)))


def begun_again(world: World, held: dict[int, tuple[int, ...]]) -> tuple[CheckpointId, Plan]:
    """Save a checkpoint and lose a stage. Return the checkpoint and the first plan of a new origin.

    held: the layers of which a worker reports copies, by the worker's position in the sorted names.
    """
    workers = sorted(world.plan.worker_ids())
    checkpoint = save(world)
    world.found = protocol.CheckpointFound(number=0, checkpoint=checkpoint)
    for number, layers in held.items():
        holds(world, workers[number], checkpoint, *layers)
    origin = world.plan.origin
    lose_stage(world)
    world.wait(lambda: world.plan.origin != origin)
    return checkpoint, world.plan


def test_a_plan_that_goes_back_names_who_has_copies() -> None:
    world = made(4, 1)
    checkpoint, plan = begun_again(world, {0: (0, 1), 1: (2,), 2: (4, 5), 3: (6,)})
    lost, living = world.lost, sorted(plan.worker_ids())
    assert (plan.restore, plan.moved, plan.reason) == (checkpoint, False, "Started")
    assert {w for holders in plan.sources for w in holders} <= set(living) - lost
    assert plan.sources[4:7] == (("w2",), ("w2",), ("w3",))
    assert plan.sources[2:4] == ((), ()), "who had copies of these is lost: they are read from the store"
    world.settle()
    assert world.plan.sources == ()
    assert "3 of 8 layers from memory" in next(e.message for e in world.told if e.reason == "RolledBack")
    train(world, 12)


def test_a_loss_before_all_have_begun_is_met_by_another_plan_from_the_same_checkpoint() -> None:
    world = made(4, 1)
    checkpoint, plan = begun_again(world, {2: (4, 5), 3: (6,)})
    world.lose("w2")
    again = world.plan
    assert (again.origin, again.restore, again.reason) == (plan.epoch + 1, checkpoint, "RollingBack")
    assert again.sources[4:7] == ((), (), ("w3",))
    world.lose("w3")
    assert (world.plan.origin, world.plan.sources) == (again.epoch + 1, ())
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
    assert set(world.state.copies.held) == {new}


@pytest.mark.parametrize("layers", [0, 1, LAYERS])
def test_a_job_that_ends_has_its_writers_remove_a_checkpoint_that_nobody_commits(layers: int) -> None:
    world = made()
    new = begin(world)
    if layers:
        written(world, new, *range(layers))
    writers = {worker for stage in sent(world, protocol.TakeCheckpoint)[-1][1].writers for worker in stage}
    world.tell(Received("w0", protocol.WorkerFailed(reason="TaskFailed", message="mine")))
    assert world.outcome is Outcome.FAILED
    told = [] if layers == LAYERS else [(w, protocol.DropCopies(checkpoints=(new,))) for w in sorted(writers)]
    assert sent(world, protocol.DropCopies) == told
