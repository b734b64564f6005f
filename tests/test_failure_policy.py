"""What the coordinator makes of workers that end for reasons of their own."""

from dataclasses import replace

import pytest

from bamboo import protocol
from bamboo.events import Outcome, Received, WorkerLost
from bamboo.names import EXIT_FENCED
from bamboo.spec import FailureAction, FailurePolicy, FailureRule
from world import World


def crash(world: World, worker: str, code: int) -> None:
    world.lost.add(worker)
    world.tell(WorkerLost(worker, f"exit code {code}", code))


def policy(limit: int, action: FailureAction | None = None) -> World:
    """A settled job with that backoff limit; action: of a rule for exit code 9."""
    world = World(2, 2, 2)
    world.settle()
    rules = (FailureRule(name="rule", on_exit_codes=(9,), action=action),) if action else ()
    spec = replace(world.state.spec, failure_policy=FailurePolicy(backoff_limit=limit, rules=rules))
    world.state = replace(world.state, spec=spec, failures=())
    return world


def test_workers_that_end_by_themselves_in_vain_end_the_job() -> None:
    world = policy(1)
    crash(world, "w1", 1)
    assert world.finish is None
    crash(world, "w4", 7)
    assert world.finish is not None
    assert (world.finish.reason, world.finish.outcome) == ("BackoffLimitExceeded", Outcome.FAILED)
    assert "w4 exit code 7" in world.finish.message


def test_workers_that_never_start_are_judged_like_others() -> None:
    world = World(2, 1, 0)
    spec = replace(world.state.spec, failure_policy=FailurePolicy(backoff_limit=1))
    world.state = replace(world.state, spec=spec, workers={}, plan=None, phase="Pending", requested=2)
    crash(world, "w8", 7)
    assert world.finish is None
    crash(world, "w9", 7)
    assert world.finish is not None
    assert world.finish.reason == "BackoffLimitExceeded"
    assert world.state.restarts == 2


@pytest.mark.parametrize("code", [None, 0, -9, EXIT_FENCED])
def test_a_disruption_is_no_failure(code: int | None) -> None:
    world = policy(0)
    world.lost.add("w1")
    world.tell(WorkerLost("w1", "taken away", code))
    assert world.finish is None
    assert world.state.failures == ()


def test_how_a_worker_ended_may_be_known_later_than_that_it_is_lost() -> None:
    world = policy(0)
    world.lose("w1")
    assert world.finish is None
    crash(world, "w1", 137)
    assert world.finish is not None
    assert "w1 exit code 137" in world.finish.message


def test_what_is_counted_does_not_depend_on_whether_its_end_or_its_loss_is_known_first() -> None:
    """A pod's status and a closed channel race each other to the coordinator."""
    counted = []
    for known_later in (True, False):
        world = policy(6)
        if known_later:
            world.lose("w1")
        crash(world, "w1", 137)
        counted.append((world.state.preemptions, world.state.restarts))
    assert counted == [(1, 1), (1, 1)]


def test_a_worker_is_judged_once() -> None:
    world = policy(1)
    crash(world, "w1", 7)
    crash(world, "w1", 7)
    assert len(world.state.failures) == 1


def test_a_committed_step_forgives() -> None:
    world = policy(1)
    crash(world, "w1", 1)
    assert len(world.state.failures) == 1
    message = protocol.StepCommitted(
        step=world.state.step, generation=0, loss=1.0, gradient_norm=1.0, microbatches=8, seconds=0.1
    )
    world.tell(Received("w0", message))
    assert world.state.failures == ()


@pytest.mark.parametrize("action", FailureAction)
def test_rules_judge_by_exit_code(action: FailureAction) -> None:
    world = policy(1, action)
    crash(world, "w1", 9)
    reason = world.finish.reason if world.finish else None
    assert reason == ("FailurePolicy" if action is FailureAction.FAIL_JOB else None)
    assert len(world.state.failures) == (action is FailureAction.RESTART_WORKER)
