"""Counts of saved and abandoned checkpoints, of stalls by saving, of restores, and of repeated steps."""

from dataclasses import replace

import msgspec
import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control import protocol
from bamboo_core.control.protocol import Received
from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.checkpointing.saving import WRITE_SECONDS
from bamboo_core.coordinator.events import (
    AbandonReason,
    CheckpointCounts,
    Interrupted,
    RestoreCause,
    RestoreProblem,
)
from bamboo_core.coordinator.job_status import status, trained_samples
from bamboo_core.coordinator.progress import EarlierProgress
from checkpoint_world import (
    LAYERS,
    begin,
    gone_back,
    lose_stage,
    made,
    parts,
    reasons,
    root_of,
    save,
    sent,
    train,
    written,
)
from world import World, back, restarted, silence


def counts(world: World) -> CheckpointCounts:
    return world.state.checkpoints.counts


def test_duration_stall_and_bytes_of_what_is_saved() -> None:
    world = made(2, 2)
    checkpoint = begin(world)
    world.now += 7.0
    for worker, layers, stall in (("w0", range(4), 0.02), ("w1", range(4, LAYERS), 0.3), ("w1", range(4, LAYERS), 0.3)):
        message = protocol.PartsWritten(checkpoint=checkpoint, parts=parts(*layers), stall=stall)
        world.tell(Received(worker, message))
    committer, _ = sent(world, protocol.CommitCheckpoint)[-1]
    world.tell(Received(committer, protocol.CheckpointCommitted(checkpoint=checkpoint)))
    found = counts(world)
    assert found.bytes == 10 * LAYERS, "what is said again is not counted again"
    assert (found.stalls.count, found.stalls.total) == (1, 0.3), "training waits for the slowest"
    assert found.durations.count == 1
    assert 7.0 < found.durations.total < 8.0, "from the commit of its step on"
    save(world, 16, "b")
    assert (counts(world).stalls.count, counts(world).stalls.total) == (2, 0.3)


@pytest.mark.parametrize("reason", AbandonReason)
def test_what_is_given_up_is_counted_with_its_reason(reason: AbandonReason) -> None:
    world = made(3, 1, 2 if reason is AbandonReason.WRITER_LOST else 0, steps=16)
    if reason is AbandonReason.TOO_LATE:
        save(world)
        train(world, 16)
        silence(world, set(), 12)
    else:
        checkpoint = begin(world)
    if reason is AbandonReason.WRITER_LOST:
        world.lose(world.state.checkpoints.writers[1][0])
    elif reason is AbandonReason.STORE_FAILED:
        world.tell(Received("w0", protocol.CheckpointFailed(checkpoint=checkpoint, message="full")))
    elif reason is AbandonReason.TOO_SLOW:
        world.now += WRITE_SECONDS
        silence(world, set(), 1)
    elif reason is AbandonReason.WENT_BACK:
        written(world, checkpoint)  # all parts, and the manifest never is
        lose_stage(world)
        world.settle()
        assert "Restoring" in reasons(world)
    assert counts(world).abandoned == {reason: 1}


@pytest.mark.parametrize("damaged", [True, False])
def test_a_checkpoint_that_cannot_be_read_is_counted_and_is_not_shown_as_the_newest(damaged: bool) -> None:
    world = made(3)
    kept = save(world)
    train(world, 13)
    plan = world.plan
    world.state = replace(
        world.state, plans=replace(world.state.plans, newest=msgspec.structs.replace(plan, restore=kept))
    )
    message = protocol.RestoreFailed(origin=plan.origin, checkpoint=kept, message="gone", damaged=damaged)
    world.tell(Received(root_of(world), message))
    assert counts(world).problems == {RestoreProblem.DAMAGED if damaged else RestoreProblem.UNREADABLE: 1}
    shown = status(world.state, world.now).checkpoint
    assert shown is not None
    assert (shown.step == 8, shown.age is None) == (not damaged, damaged)


def test_samples_of_steps_that_are_repeated_count_once() -> None:
    world, _ = gone_back()
    before = world.state
    world.settle()
    assert 8 < world.state.step < 13
    train(world, 13)
    assert trained_samples(world.state) == trained_samples(before)
    train(world, 15)
    assert trained_samples(world.state) == 15 * 8


def test_what_was_committed_before_a_coordinator_was_made_is_not_counted_as_new() -> None:
    world = made()
    plan = restarted(world)
    for worker in sorted(plan.worker_ids()):
        back(world, worker, plan)
    newest = protocol.StepCommitted(step=49, generation=0, loss=1.0, gradient_norm=1.0, microbatches=8, seconds=0.0)
    world.tell(Received(root_of(world), newest))
    assert (world.state.step, trained_samples(world.state)) == (50, 0)
    train(world, 52)
    assert trained_samples(world.state) == 2 * 8


@pytest.mark.parametrize("lost", ["the operator and all workers", "all at a suspension that kept nothing"])
def test_a_new_coordinator_knows_from_its_shell_what_has_to_be_repeated(lost: str) -> None:
    """A new coordinator counts repeated steps from the `EarlierProgress` that `coordinator.initial` gets."""
    world = made()
    earlier = EarlierProgress(step=13, step_seconds=2.0)
    resumed = lost == "the operator and all workers"
    world.state = coordinator.initial(
        world.spec, world.document, secret="", now=world.now, resumed=resumed, earlier=earlier
    )
    world.lost |= {f"w{number}" for number in range(world.count)}
    world.pending.clear()
    world.plans.clear()
    world.found = protocol.CheckpointFound(number=0, checkpoint=CheckpointId(step=8, id="a"))
    world.wait(lambda: world.state.plan is not None)
    assert (world.state.step, counts(world).repeated, counts(world).repeated_seconds) == (8, 5, 10.0)
    assert counts(world).restores == {RestoreCause.WORKERS_GONE if resumed else RestoreCause.SUSPENDED: 1}
    train(world, 13)
    assert trained_samples(world.state) == 0
    world.tell(Interrupted())
