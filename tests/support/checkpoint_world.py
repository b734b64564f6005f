"""Builders and actions for tests of checkpoints with the coordinator of a `World`: saving, restoring and copies."""

from typing import Any

from bamboo_core.checkpoint.layout import CheckpointId, part_name
from bamboo_core.checkpoint.manifest import CheckpointPart
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received, StateSums
from bamboo_core.coordinator.checkpointing.saving import first_number
from bamboo_core.planning.plan import ROOT, Cell
from world import World

LAYERS = 8  # of the world's task


ORIGIN = 1  # of a job that has not gone back to a checkpoint


FIRST = first_number("", 0.0) + 1  # the number of a world's first `TakeCheckpoint`


STARTS = {"a": CheckpointId(step=6, id="a"), "b": CheckpointId(step=3, id="b")}


def made(stages: int = 2, pipelines: int = 1, standby: int = 0, *, steps: int = 10_000, **checkpoint: Any) -> World:
    """Return a world that trains, and has committed at least one step. checkpoint: fields of `spec.checkpoint`."""
    world = World(stages, pipelines, standby, steps=steps, checkpoint={"everySteps": 8, **checkpoint})
    world.settle()
    assert world.state.phase == "Running"
    return world


def root_of(world: World) -> str:
    return world.plan.at(ROOT).owner


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
    """Train to `step`; the root begins a checkpoint and all holders report checksums. Return the checkpoint's ID."""
    train(world, step - 1)
    checkpoint = CheckpointId(step=step, id=id)
    world.commit((world.state.checkpoints.number, checkpoint))
    tell_sums(world, step)
    return checkpoint


def tell_sums(world: World, version: int) -> None:
    """Let all `certain_holders` of each stage report equal checksums of the stage's state at `version`."""
    for stage, holders in enumerate(world.state.certain_holders(world.plan)):
        for worker in holders:
            world.tell(Received(worker, StateSums(stage=stage, version=version, sums={"w": "0" * 16})))


def save(world: World, step: int = 8, id: str = "a") -> CheckpointId:
    checkpoint = begin(world, step, id)
    written(world, checkpoint)
    committer, _ = sent(world, protocol.CommitCheckpoint)[-1]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint, tidied=True)))
    return checkpoint


def finished(world: World) -> None:
    """Let all holders report equal checksums of the last step, and each cell's owner report that it has finished."""
    tell_sums(world, world.spec.training.steps)
    for cell in world.plan.cells():
        message = protocol.CellFinished(cell=cell, digest="0" * 64)
        world.tell(Received(world.plan.at(cell).owner, message))


def lose_stage(world: World) -> None:
    """Lose all holders of stage 1 of a job with one pipeline; at least one other worker must survive."""
    plan = world.plan
    for worker in sorted(plan.at(Cell(0, 1)).holders):
        world.lose(worker)
    assert world.state.workers


def started(checkpoint: CheckpointId, **found: Any) -> World:
    """Return a world whose store had this checkpoint before the job began. found: more fields of `CheckpointFound`."""
    world = World(2, 1, 0, checkpoint={"everySteps": 8})
    world.found = protocol.CheckpointFound(number=0, checkpoint=checkpoint, **found)
    world.settle()
    return world


def gone_back(*, skipped: bool = False) -> tuple[World, str]:
    """Return a world that went from step 13 back to its checkpoint of step 8, and the worker that searched the store.

    skipped: whether step 13 left the model unchanged.
    """
    world = made(3)
    kept = save(world)
    train(world, 12)
    world.commit(skipped=skipped)
    world.found = None
    lose_stage(world)
    world.settle()
    asked, _ = sent(world, protocol.FindCheckpoint)[-1]
    world.tell(Received(asked, protocol.CheckpointFound(number=world.state.restoring.question, checkpoint=kept)))
    return world, asked
