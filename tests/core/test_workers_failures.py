"""Lost workers: which losses count as failures, and when failures or other losses end the job."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.protocol import ChannelClosed, Received
from bamboo_core.coordinator.events import Outcome, PreemptionNotice, WorkerLost
from bamboo_core.coordinator.records.workers import Workers
from bamboo_core.coordinator.workers.failures import most_losses
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.names import EXIT_FENCED
from bamboo_core.planning.plan import Cell
from world import World, silence


def crash(world: World, worker: str, code: int) -> None:
    world.lost.add(worker)
    world.tell(WorkerLost(worker, f"exit code {code}", code))


def limited(limit: int, *, shape: tuple[int, int, int] = (2, 2, 2), mode: str = "") -> World:
    """Return a settled job with this backoff limit. shape: stages, pipelines, standby workers."""
    world = World(*shape)
    if mode:
        changed = replace(world.spec, redundancy=replace(world.spec.redundancy, mode=RedundancyMode(mode)))
        world.state = replace(world.state, terms=replace(world.state.terms, spec=changed))
    world.settle()
    spec = replace(world.state.spec, backoff_limit=limit)
    world.state = replace(
        world.state,
        terms=replace(world.state.terms, spec=spec),
        worker_ends=replace(world.state.worker_ends, failures=()),
    )
    return world


def test_workers_that_end_by_themselves_in_vain_end_the_job() -> None:
    world = limited(1)
    crash(world, "w1", 1)
    assert world.finish is None
    crash(world, "w4", 7)
    assert (world.end.reason, world.end.outcome) == ("BackoffLimitExceeded", Outcome.FAILED)
    assert "w4 exit code 7" in world.end.message


def test_workers_that_never_start_are_judged_like_others() -> None:
    world = World(2, 1, 0)
    spec = replace(world.state.spec, backoff_limit=1)
    world.state = replace(
        world.state,
        workers=Workers(),
        terms=replace(world.state.terms, spec=spec),
        plans=replace(world.state.plans, newest=None),
        course=replace(world.state.course, phase="Pending"),
        membership=replace(world.state.membership, requested=2),
    )
    crash(world, "w8", 7)
    assert world.finish is None
    crash(world, "w9", 7)
    assert world.end.reason == "BackoffLimitExceeded"
    assert world.state.worker_ends.restarts == 2


@pytest.mark.parametrize("code", [None, -9, EXIT_FENCED])
def test_a_disruption_is_no_failure(code: int | None) -> None:
    world = limited(0)
    world.lost.add("w1")
    world.tell(WorkerLost("w1", "taken away", code))
    assert world.finish is None
    assert world.state.worker_ends.failures == ()


def miss(world: World, worker: str) -> None:
    """Close a worker's channel and links, before the coordinator learns how the worker ended."""
    world.lost.add(worker)
    other = next(w for w in world.state.workers if w != worker)
    world.tell(Received(other, protocol.PeerDown(peer=worker)))
    world.tell(ChannelClosed(worker))
    assert worker in world.state.membership.gone


@pytest.mark.parametrize("code", [0, 1, 137])
def test_what_is_made_of_an_end_does_not_depend_on_whether_it_or_the_loss_is_heard_first(code: int) -> None:
    """The coordinator decides the same whether it learns of a worker's exit code or of its closed links first."""
    made = []
    for missed_first in (True, False):
        world = limited(1)
        if missed_first:
            miss(world, "w1")
            assert world.state.worker_ends.failures == ()
        crash(world, "w1", code)
        ended = world.finish and (world.end.reason, world.end.message)
        made.append(
            (
                ended,
                world.state.worker_ends.failures,
                world.state.membership.preemptions,
                world.state.worker_ends.restarts,
                world.state.worker_ends.since_commit,
            )
        )
    assert made[0] == made[1]
    assert made[0][:4] == (None, (f"w1 exit code {code}",), 1, 1)


@pytest.mark.parametrize("late", [True, False])
def test_a_disruption_that_is_missed_first_is_none_the_less_a_disruption(late: bool) -> None:
    world = limited(0)
    if late:
        miss(world, "w1")
    world.lose("w1")
    assert (world.finish, world.state.worker_ends.failures, world.state.membership.preemptions) == (None, (), 1)
    assert world.state.worker_ends.since_commit["w1"].disrupted


def test_a_worker_that_leaves_after_its_notice_has_not_ended_by_itself() -> None:
    world = limited(0)
    world.tell(PreemptionNotice("w1", 30.0))
    crash(world, "w1", 0)
    assert (world.finish, world.state.worker_ends.failures) == (None, ())


def lose_in_vain(world: World, lose: Callable[[str], None]) -> int:
    """Lose the owner of stage 1 until the job ends. Return the number of losses; 200 if the job survives 199."""
    for count in range(1, 200):
        lose(world.plan.at(Cell(0, 1)).owner)
        while world.pending:
            world.deliver()
        if world.finish:
            return count
    return 200


def frozen(world: World, worker: str) -> None:
    """Lose a frozen worker: its channel and links close, and then its process is killed."""
    miss(world, worker)
    world.tell(WorkerLost(worker, "was killed by SIGKILL", removed=True))


def test_a_job_that_loses_workers_and_commits_nothing_ends_although_no_loss_counts() -> None:
    world = limited(1)
    count = lose_in_vain(world, partial(frozen, world))
    assert count == most_losses(world.state.spec) + 1 < 20
    assert (world.end.reason, world.end.outcome) == ("WorkersKeepFailing", Outcome.FAILED)
    assert f"{count} workers were lost and no step was committed in between" in world.end.message
    assert "its control channel is closed" in world.end.message


def test_workers_that_are_taken_away_do_not_speak_against_the_job() -> None:
    world = limited(1)
    assert lose_in_vain(world, world.lose) == 200


def give_up(world: World, *, seconds: float) -> None:
    """Close the channels and links of all holders of stage 1, and let `seconds` pass."""
    for worker in world.plan.at(Cell(0, 1)).holders:
        miss(world, worker)
    wait(world, seconds)


def wait(world: World, seconds: float) -> None:
    """Let `seconds` pass, or less if the job ends, while all workers send heartbeats."""
    until = world.now + seconds
    while world.now < until and world.finish is None:
        silence(world, set(), 0.5)
        while world.pending:
            world.deliver()


def test_a_stage_is_given_up_only_once_it_can_be_known_how_its_workers_ended() -> None:
    """Before it gives up a stage, the coordinator waits for the exit codes of the stage's workers, to report them."""
    world = limited(0, shape=(3, 1, 0))
    give_up(world, seconds=3.0)
    assert world.finish is None
    crash(world, "w1", 9)
    assert world.end.reason == "BackoffLimitExceeded"


@pytest.mark.parametrize("mode", ["Replicas", "None"])
def test_a_lost_stage_is_told_with_those_who_held_it_and_how_they_ended(mode: str) -> None:
    world = limited(6, shape=(3, 1, 0), mode=mode)
    give_up(world, seconds=3.0)
    crash(world, "w1", 137)
    wait(world, 60.0)
    assert (world.end.reason, world.end.outcome) == ("StageLost", Outcome.UNRECOVERABLE)
    if mode == "None":
        told = "lost with w1 (exit code 137); redundancy.mode None keeps no other copy"
    else:
        told = "lost with w0 (its control channel is closed, and w2 cannot reach it), after w1 (exit code 137) since"
    assert world.end.message.startswith(f"stage 1 of pipeline 0: {told}")


def test_how_workers_ended_is_said_once_of_all_that_ended_alike() -> None:
    world = limited(6, shape=(3, 2, 0))
    for worker in ("w1", "w4", "w0", "w3"):
        crash(world, worker, 137)
    wait(world, 60.0)
    assert world.end.message.count("exit code 137") == 1
    assert "likewise" in world.end.message
    assert all(worker in world.end.message for worker in ("w0", "w1", "w3", "w4"))


def test_a_committed_step_forgives() -> None:
    world = limited(1)
    crash(world, "w1", 1)
    assert len(world.state.worker_ends.failures) == 1
    world.commit()
    assert world.state.worker_ends.failures == ()
