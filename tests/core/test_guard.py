"""Reports of differing states and results: how far the job goes back, when it ends, and the messages about it."""

from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, SpotCheckDiffers, StateSums
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.records.workers import KEPT_VERSIONS, GuardState
from bamboo_core.planning.plan import Cell
from checkpoint_world import finished, made, save, sent, tell_sums, train, written
from world import World

X, Y = ({"w": f"{number:016x}", "exp_avg": "0" * 16} for number in (1, 2))


def tell(world: World, worker: str, version: int, sums: dict[str, str], stage: int = 1) -> None:
    world.tell(Received(worker, StateSums(stage=stage, version=version, sums=sums)))


def differ(world: World, version: int, stage: int = 1) -> tuple[str, str]:
    """Let a stage's owner and its replica report different checksums. Return both workers."""
    role = world.plan.at(Cell(0, stage))
    owner, shadow = role.owner, role.replicas[0]
    tell(world, owner, version, X, stage)
    tell(world, shadow, version, Y, stage)
    return owner, shadow


def spot(world: World, step: int) -> None:
    message = SpotCheckDiffers(cell=Cell(0, 1), step=step, message="the output of layer 3 (Linear) differs")
    world.tell(Received("w0", message))


def test_at_the_first_difference_the_job_goes_back_and_at_the_second_it_ends() -> None:
    world = made(3)
    kept = save(world)
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    train(world, 17)
    owner, shadow = differ(world, 16)
    assert world.state.phase == "Restoring"
    told = next(event for event in world.told if event.reason == "ResultsDiffer")
    assert told.message == f"{shadow} and {owner} hold other bits of stage 1 after 16 steps; first difference: w"
    assert kept in world.state.checkpoints.kept, "it is of a state from before"
    world.settle()
    assert world.plan.restore == kept
    train(world, 17)
    differ(world, 16)
    assert (world.end.outcome, world.end.reason) == (Outcome.FAILED, "ResultsDiffer")
    assert "hold other bits of stage 1 after 16 steps; first difference: w; the job had gone back" in world.end.message


def test_without_checkpoints_it_ends_at_the_first_one() -> None:
    world = World(3, 1, 0)
    world.settle()
    owner, shadow = differ(world, 4)
    assert (world.end.outcome, world.end.reason) == (Outcome.FAILED, "ResultsDiffer")
    assert f"{shadow} and {owner} hold other bits of stage 1 after 4 steps" in world.end.message
    later = made(3)
    save(later)
    differ(later, 4)
    later.settle()
    assert (later.end.outcome, later.end.reason) == (Outcome.FAILED, "ResultsDiffer"), "no checkpoint is from before"


def awaiting_checksums() -> tuple[World, list[tuple[int, str]]]:
    """Return a job whose checkpoint of step 8 is written, and the stages and workers whose checksums it lacks."""
    world = made(3)
    train(world, 7)
    checkpoint = protocol.CheckpointId(step=8, id="a")
    world.commit((world.state.checkpoints.number, checkpoint))
    written(world, checkpoint)
    return world, [(stage, worker) for stage, mine in enumerate(world.state.checkpoints.writers) for worker in mine]


def test_a_checkpoint_becomes_one_when_all_who_write_it_have_told_the_same() -> None:
    world, holders = awaiting_checksums()
    for stage, worker in holders:
        assert not sent(world, protocol.CommitCheckpoint)
        tell(world, worker, 8, X, stage)
    assert sent(world, protocol.CommitCheckpoint)


def test_a_writer_that_is_lost_is_not_waited_for() -> None:
    world, (*others, (stage, last)) = awaiting_checksums()
    for stage, worker in others:
        if worker != last:
            tell(world, worker, 8, X, stage)
    world.lose(last)
    world.settle()
    assert sent(world, protocol.CommitCheckpoint)


def test_a_spot_check_leaves_the_state_before_its_step_good() -> None:
    world = made(3)
    kept = save(world)
    later = save(world, 16, "b")
    world.found = protocol.CheckpointFound(number=0, checkpoint=kept)
    train(world, 17)
    spot(world, 10)
    assert world.state.phase == "Restoring"
    assert (world.state.checkpoints.bad, world.state.checkpoints.kept_at) == ((later,), None)
    assert world.state.restoring.message == "the output of layer 3 (Linear) differs"
    world.settle()
    spot(world, 10)
    assert world.end.reason == "ResultsDiffer"


def test_what_workers_tell_of_states_that_are_given_up_does_not_count() -> None:
    world = made(3)
    differ(world, 4)
    assert world.state.phase == "Restoring"
    spot(world, 3)
    differ(world, 4)
    assert world.finish is None
    assert world.state.guard.differences == 1


def test_the_job_completes_when_all_who_hold_the_last_state_have_told_the_same() -> None:
    world = World(2, 1, 0, steps=4)
    world.settle()
    train(world, 4)
    for cell in world.plan.cells():
        world.tell(Received(world.plan.at(cell).owner, protocol.CellFinished(cell=cell, digest="0" * 64)))
    assert world.finish is None
    tell_sums(world, 4)
    assert world.outcome is Outcome.COMPLETE


def test_a_difference_of_the_last_state_is_found() -> None:
    world = World(2, 1, 0, steps=4)
    world.settle()
    train(world, 4)
    differ(world, 4)
    finished(world)
    assert world.outcome is Outcome.FAILED


def test_the_newest_versions_are_kept_and_that_of_a_checkpoint_in_progress() -> None:
    guard = GuardState()
    for version in range(9):
        guard = guard.reporting(1, (0, version), "w0", X, 2)
    assert [version for _, version in guard.reported] == [2, *range(9 - KEPT_VERSIONS, 9)]
    assert guard.are_equal(1, 2, [{"w0"}])
    assert not guard.are_equal(1, 2, [{"w0", "w1"}])
    assert not guard.are_equal(2, 2, [{"w0"}]), "states of another origin"
    assert guard.reporting(2, (0, 3), "w0", X, None).reported.keys() == {(0, 3)}
