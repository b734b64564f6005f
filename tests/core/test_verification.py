"""Results that differ: what the coordinator asks, whom it blames, how far the job goes back, and what people hear."""

from typing import Any

import pytest

from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received
from bamboo_core.control.verification import ForwardDiffers, ForwardPlace, ForwardSum, LookAgain
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.job_status import status
from bamboo_core.coordinator.verification.verification import MOST_RETURNS, PAST_STEPS
from bamboo_core.planning.plan import Cell
from checkpoint_world import reasons, save, sent, train
from world import World

MIDDLE = Cell(0, 1)  # owned by w1, shadowed by w0
X, Y, Z = ("0" * 15 + digit for digit in "123")


def made(verify: str = "Replace", stages: int = 3, standby: int = 1, *, replicas: int = 1) -> World:
    """A world that trains, and whose replicas are filled."""
    redundancy = {"mode": "EagerForward", "verify": verify, "replicas": replicas}
    world = World(stages, 1, standby, checkpoint={"everySteps": 8}, redundancy=redundancy)
    world.settle()
    assert world.plan.at(MIDDLE).owner == "w1"
    assert world.plan.at(MIDDLE).shadow == "w0"
    return world


def differ(world: World, again: str | None, *, step: int = 5, theirs: str = X, mine: str = Y) -> ForwardPlace:
    """The shadow of the middle stage has come to another result than its owner, and what it came to then."""
    place, role = ForwardPlace(MIDDLE, step, 2), world.plan.at(MIDDLE)
    assert role.shadow is not None
    said = ForwardDiffers(place=place, owner=role.owner, theirs=theirs, mine=mine, again=again)
    world.tell(Received(role.shadow, said))
    return place


def asked(world: World) -> set[str]:
    """Whom the newest question went to."""
    (*_, (_, newest)) = sent(world, LookAgain)
    return {worker for worker, message in sent(world, LookAgain) if message == newest}


def corrupt(world: World) -> tuple[str, ...]:
    shown = status(world.state, world.now).differences
    assert shown is not None
    return shown.corrupt


def test_without_verification_nobody_looks() -> None:
    world = made("None")
    differ(world, Y)
    assert status(world.state, world.now).differences is None


def test_with_report_an_owner_that_comes_to_another_result_again_is_named_and_stays() -> None:
    world = made("Report")
    place = differ(world, Y)
    assert not corrupt(world)
    world.tell(Received("w1", ForwardSum(place=place, sum=Y)))
    assert corrupt(world) == ("w1",)
    assert "w1" in world.state.workers
    assert not world.state.verification.disputes
    assert not sent(world, LookAgain), "nobody repeats the step"


def test_with_report_what_nobody_says_more_of_is_forgotten_and_stays_unresolved() -> None:
    world = made("Report")
    place = differ(world, Y)
    world.tell(Received("w1", ForwardSum(place=place, sum=X)))
    train(world, place.step + PAST_STEPS + 1)
    assert not world.state.verification.disputes
    assert "CorruptionNotNamed" not in reasons(world)
    shown = status(world.state, world.now).differences
    assert shown is not None
    assert shown.unresolved


def test_a_shadow_that_is_wrong_once_is_lost_and_nothing_is_repeated() -> None:
    world = made()
    differ(world, X)
    assert corrupt(world) == ("w0",)
    assert "w0" not in world.state.workers
    assert world.state.phase == "Running"
    assert "Restoring" not in reasons(world), "nobody has used what it computed in advance"


def test_an_owner_is_told_by_what_it_comes_to_again_after_the_job_went_back() -> None:
    world = made()
    checkpoint = save(world, 8)
    world.found = protocol.CheckpointFound(number=0, checkpoint=checkpoint)
    train(world, 12)
    place = differ(world, Y, step=9)
    assert world.state.phase == "Restoring"
    assert asked(world) == set(world.state.workers)
    assert sent(world, LookAgain)[-1][1].places == (place,)
    assert checkpoint not in world.state.checkpoints.bad, "it is of a state from before"
    world.settle()
    world.tell(Received("w1", ForwardSum(place=place, sum=Z)))
    assert corrupt(world) == ("w1",)
    assert "w1" not in world.state.workers
    assert not world.state.verification.disputes
    assert sent(world, LookAgain)[-1][1].places == (), "the question is withdrawn"


def test_checkpoints_that_were_taken_since_are_no_good() -> None:
    world = made()
    save(world, 8)
    train(world, 10)
    differ(world, Y, step=5)
    assert [one.step for one in world.state.checkpoints.bad] == [8]
    assert not world.state.checkpoints.kept
    world.settle()
    assert world.state.phase == "Running", "without one it begins with its first step"


def test_what_never_can_be_told_ends_the_job_after_some_returns() -> None:
    """Every worker comes to its own result, and always to the same one."""
    world, own = made(), {"w0": Y, "w1": X}
    for _ in range(MOST_RETURNS + 1):
        assert world.finish is None
        train(world, 7)
        role = world.plan.at(MIDDLE)
        differ(world, None, theirs=own.get(role.owner, Z), mine=own[role.shadow or ""])
        world.settle()
    assert world.finish is not None
    assert (world.finish.outcome, world.finish.reason) == (Outcome.FAILED, "ResultsDiffer")
    assert f"{MOST_RETURNS} times" in world.finish.message


def test_what_nobody_comes_to_twice_is_the_tasks_fault() -> None:
    world = made()
    train(world, 7)
    differ(world, Y)
    world.settle()
    train(world, 7)
    differ(world, None, theirs=Z, mine=X)
    assert world.finish is not None
    assert world.finish.reason == "NotDeterministic"


def test_what_the_job_has_passed_again_without_a_difference_is_given_up_with_a_word() -> None:
    world = made()
    train(world, 7)
    differ(world, Y)
    world.settle()
    train(world, 5 + PAST_STEPS)
    assert "CorruptionNotNamed" not in reasons(world)
    train(world, 5 + PAST_STEPS + 2)
    assert reasons(world)[-1] == "CorruptionNotNamed"
    assert not world.state.verification.disputes
    assert corrupt(world) == ()


@pytest.mark.parametrize(
    "message",
    [
        ForwardDiffers(place=ForwardPlace(Cell(0, 9), 1, 0), owner="w1", theirs=X, mine=Y),
        ForwardDiffers(place=ForwardPlace(MIDDLE, 1, 0), owner="nobody", theirs=X, mine=Y),
        ForwardSum(place=ForwardPlace(MIDDLE, 1, 0), sum=X),
    ],
)
def test_what_belongs_to_nothing_changes_nothing(message: Any) -> None:
    world = made()
    before = world.state.verification
    world.tell(Received("w0", message))
    assert world.state.verification == before
