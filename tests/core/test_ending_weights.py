"""The final weights: every stage is written, then one worker makes the folder of them, whoever is lost meanwhile."""

from dataclasses import replace
from typing import Any

from bamboo_core.control import protocol
from bamboo_core.control.channel_events import Received, WorkerJoined
from bamboo_core.control.weights import CommitWeights, Save, Saved, WeightsCommitted
from bamboo_core.coordinator.ending.weights import SAVE_SECONDS
from bamboo_core.coordinator.events import Outcome, Tick
from bamboo_core.coordinator.workers.record import Workers
from bamboo_core.planning.plan import Cell
from checkpoint_world import finished, sent, train, written
from world import World


def saving(stages: int = 3, standby: int = 0) -> World:
    """All steps are done, and the stages are asked for."""
    world = World(stages, 1, standby, steps=4)
    world.settle()
    return ended(world)


def ended(world: World) -> World:
    world.state = replace(world.state, terms=replace(world.state.terms, save_path="out"))
    train(world, world.spec.training.steps)
    finished(world)
    if requests := sent(world, protocol.KeepLastState):
        written(world, requests[-1][1].checkpoint)
        committer, request = sent(world, protocol.CommitCheckpoint)[-1]
        for tidied in (False, True):
            told = protocol.CheckpointCommitted(checkpoint=request.checkpoint, tidied=tidied)
            world.tell(Received(committer, told))
    assert world.state.phase == "Saving"
    return world


def asked(world: World) -> list[tuple[str, Save]]:
    return sent(world, Save)


def write(world: World, *requests: tuple[str, Save]) -> None:
    for worker, request in requests:
        world.tell(Received(worker, Saved(stage=request.stage, number=request.number)))


def owner(world: World, stage: int) -> str:
    return world.plan.at(Cell(0, stage)).owner


def commit(world: World, worker: str, request: CommitWeights) -> None:
    world.tell(Received(worker, WeightsCommitted(number=request.number)))


def lose(world: World, worker: str) -> None:
    world.lose(worker)
    pass_time(world, 0.0)


def pass_time(world: World, seconds: float) -> None:
    world.now += seconds
    world.tell(Tick())
    while world.pending:
        world.deliver()


def outcome(world: World) -> Any:
    return world.finish and (world.finish.outcome, world.finish.reason)


def test_the_folder_is_made_once_all_stages_are_written_and_then_the_job_is_complete() -> None:
    world = saving(3)
    requests = asked(world)
    assert [(w, r.stage, r.stages, r.path) for w, r in requests] == [(owner(world, s), s, 3, "out") for s in range(3)]
    write(world, *requests[1:])
    assert sent(world, CommitWeights) == []
    write(world, requests[0])
    ((worker, request),) = sent(world, CommitWeights)
    assert request == CommitWeights(stages=3, path="out", number=requests[0][1].number)
    assert outcome(world) is None
    commit(world, worker, request)
    assert outcome(world) == (Outcome.COMPLETE, "Complete")


def test_who_comes_back_after_a_cut_is_asked_again_for_the_same_saving() -> None:
    world = saving(2)
    (worker, request), other = asked(world)
    world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=world.plan)))
    assert asked(world)[2:] == [(worker, request)]
    write(world, (worker, request), other)
    world.tell(WorkerJoined(protocol.Hello(worker=worker, host="h", port=1, plan=world.plan)))
    assert asked(world)[3:] == [], "it is written"
    first, again = sent(world, CommitWeights)
    assert first == again


def test_in_the_place_of_a_worker_that_is_lost_another_one_writes_and_makes_the_folder() -> None:
    world = saving(3, standby=1)
    requests = asked(world)
    write(world, *requests[:2])
    lost = requests[2][0]
    lose(world, lost)
    (heir, request), *rest = asked(world)[3:]
    assert (rest, request) == ([], requests[2][1])
    assert heir != lost
    write(world, (heir, request))
    committer, commitment = sent(world, CommitWeights)[-1]
    lose(world, committer)
    other, again = sent(world, CommitWeights)[-1]
    assert (other != committer, again) == (True, commitment), "whatever states it holds: all stages are written"
    commit(world, other, again)
    assert outcome(world) == (Outcome.COMPLETE, "Complete")


def test_workers_that_do_not_write_fail_the_job_after_a_while() -> None:
    world = saving(2)
    heard = {w: replace(r, seen=world.now + SAVE_SECONDS) for w, r in world.state.workers.items()}
    world.state = replace(world.state, workers=Workers(heard))
    world.now += SAVE_SECONDS + 1
    world.tell(Tick())
    assert outcome(world) == (Outcome.FAILED, "SaveTimeout")


def stops(world: World) -> set[int | None]:
    return {stop.discard for stop in world.stops}


def fail_to_save(world: World) -> World:
    heard = {w: replace(r, seen=world.now + 2 * SAVE_SECONDS) for w, r in world.state.workers.items()}
    world.state = replace(world.state, workers=Workers(heard))
    pass_time(world, SAVE_SECONDS / 2)
    pass_time(world, SAVE_SECONDS + 1)
    assert outcome(world) == (Outcome.FAILED, "SaveTimeout")
    return world


def test_workers_of_a_job_that_ends_before_all_is_written_remove_what_is_there() -> None:
    world = saving(3)
    requests = asked(world)
    write(world, *requests[:2])
    fail_to_save(world)
    assert stops(world) == {requests[0][1].number}


def test_what_somebody_may_be_making_the_folder_of_is_not_removed() -> None:
    """Also after the one who was asked has come back, or is lost."""
    world = saving(2, standby=1)
    write(world, *asked(world))
    ((committer, _),) = sent(world, CommitWeights)
    world.tell(WorkerJoined(protocol.Hello(worker=committer, host="h", port=1, plan=world.plan)))
    lose(world, committer)
    fail_to_save(world)
    assert stops(world) == {None}
