"""Which plan a worker obeys, and which one waits for its step boundary."""

import msgspec

from bamboo_core.planning.plan import Cell, Plan
from bamboo_trainer.routing.plan_state import PlanState
from replica_kit import planned

FIRST = planned(2, 1, 1, "a")


def plan(epoch: int, *, boundary: bool = False, without: str = "") -> Plan:
    workers = tuple(p for p in FIRST.workers if p.worker != without)
    return msgspec.structs.replace(FIRST, epoch=epoch, boundary=boundary, workers=workers)


def test_a_plan_is_in_force_at_once_unless_it_waits_for_a_boundary() -> None:
    state = PlanState("w0", plan(1))
    assert state.offer(plan(1)) is None, "it is not newer"
    assert state.offer(plan(2)) == plan(2)
    assert state.offer(plan(3, boundary=True)) is None
    assert (state.current.epoch, state.newest.epoch) == (1, 3)
    assert state.require(2) is None
    assert state.require(3) == plan(3, boundary=True)


def test_the_root_may_be_ahead_of_the_plan() -> None:
    state = PlanState("w0", plan(1))
    assert state.require(4) is None
    assert state.is_outdated
    assert state.offer(plan(4, boundary=True)) == plan(4, boundary=True)
    state.activate(plan(4, boundary=True))
    assert not state.is_outdated


def test_a_newer_plan_overtakes_the_one_that_waits() -> None:
    state = PlanState("w0", plan(1))
    state.offer(plan(2, boundary=True))
    state.activate(plan(3))
    assert state.pending is None
    state.offer(plan(5, boundary=True))
    state.activate(plan(4))
    assert state.pending is not None


def test_words_of_a_worker_that_was_declared_lost_are_not_accepted() -> None:
    state = PlanState("w0", plan(3, without="w1"))
    assert not state.accepts("w1", 2)
    assert state.accepts("w1", 4), "it may have joined again in a plan that is not here yet"
    assert state.accepts("w0", 1)
    assert state.others() == set()
    assert state.owner(Cell(0, 1)) == FIRST.at(Cell(0, 1)).owner


def test_links_matter_only_between_workers_of_the_plan() -> None:
    state = PlanState("w0", plan(1))
    assert state.link_broke("w1")
    assert not state.link_broke("stranger")
    assert state.links_down == {"w1"}
    state.activate(plan(2, without="w1"))
    assert state.links_down == set()
    assert not state.link_stands("w1")
