"""What a shadow computes in advance, when, and of what it is no use any more."""

import msgspec
import pytest
import torch

from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import ROOT, Cell, Plan
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import Commit
from engine_kit import THREE, OneEngine
from replica_kit import after_loss

SHADOWED = Cell(0, 1)  # of w0, which runs the first stage


def mode(wanted: RedundancyMode) -> Plan:
    return msgspec.structs.replace(THREE, mode=wanted)


def names(one: OneEngine) -> list[tuple[str, int]]:
    return [(name, m) for name, cell, m in one.did if cell == SHADOWED]


def at_work(wanted: RedundancyMode) -> OneEngine:
    """w0 in its first step: it waits for the gradient of its first microbatch."""
    one = OneEngine("w0", mode(wanted))
    one.work()
    return one


@pytest.mark.parametrize(("wanted", "expected"), [("None", []), ("LazyForward", [("Rehearsal", 0)])])
def test_without_eager_redundancy_nothing_is_computed_in_advance(wanted: str, expected: list[object]) -> None:
    """But it is tried once: what runs for the first time is slow, and must not be so in a takeover."""
    one = at_work(RedundancyMode(wanted))
    assert names(one) == expected
    assert one.inside.redundant.shadows == {}


def test_nothing_is_tried_out_in_a_step_in_which_roles_have_changed() -> None:
    """Others may wait for what is repeated then. w2 is the shadow of the first stage, whose inputs are always there."""
    plan = mode(RedundancyMode.LAZY_FORWARD)
    calm, changed = OneEngine("w2", plan), OneEngine("w2", plan)
    changed.engine.obey(msgspec.structs.replace(plan, epoch=plan.epoch + 1))
    assert calm.work() == [("Rehearsal", 0)]
    assert changed.work() == []


def test_backwards_in_advance_are_done_in_the_cells_own_order_as_gradients_come() -> None:
    """Its inputs are in the log of the shadow, who has sent them."""
    one = at_work(RedundancyMode.EAGER_BACKWARD)
    assert names(one) == [("Rehearsal", 0), *(("RedundantForward", m) for m in range(3))]
    one.get(FrameKind.GRADIENT, SHADOWED, torch.ones(1, 3), microbatch=1)
    assert one.work() == [], "that of the first microbatch is missing"
    one.get(FrameKind.GRADIENT, SHADOWED, torch.ones(1, 3), microbatch=0)
    one.work()
    assert names(one) == [
        ("RedundantBackward", 0),
        ("RedundantForward", 3),
        ("RedundantBackward", 1),
        ("RedundantForward", 4),
    ]


def test_forwards_in_advance_are_run_only_where_the_bubble_has_room() -> None:
    """Not before two bubbles are measured, nor in steps that measure; then as long as a layer fits."""
    one = at_work(RedundancyMode.EAGER_FORWARD)
    assert names(one) == [("Rehearsal", 0)]
    budget, active = one.inside.redundant.budget, one.inside.executor.cells[ROOT]
    budget.ran_layer(1, 1, 0.01)
    for seconds in (0.1, 0.1):
        budget.waited((ROOT, active.place), seconds)
    one.work()
    assert names(one) == [("RedundantForward", m) for m in range(5)]
    another = at_work(RedundancyMode.EAGER_FORWARD)
    another.inside.redundant.budget.ran_layer(1, 1, 0.2)
    for seconds in (0.1, 0.1):
        another.inside.redundant.budget.waited((ROOT, active.place), seconds)
    assert another.work() == [], "no layer fits"


def test_a_wait_that_is_over_leaves_no_room() -> None:
    one = at_work(RedundancyMode.EAGER_FORWARD)
    budget, place = one.inside.redundant.budget, one.inside.executor.cells[ROOT].place
    budget.ran_layer(1, 1, 0.01)
    for seconds in (0.1, 0.1):
        budget.waited((ROOT, place), seconds)
    one.now += 0.095
    assert one.work() == []


def test_what_was_computed_of_a_state_that_has_changed_is_dropped() -> None:
    one = at_work(RedundancyMode.EAGER_BACKWARD)
    assert one.inside.redundant.shadows.keys() == {SHADOWED}
    one.inside.redundant.drop(2)
    assert one.inside.redundant.shadows.keys() == {SHADOWED}, "of another stage"
    one.inside.redundant.drop(1)
    assert one.inside.redundant.shadows == {}


def test_who_takes_a_cell_over_goes_on_from_what_was_computed_in_advance() -> None:
    plan = mode(RedundancyMode.EAGER_BACKWARD)
    one = OneEngine("w0", plan)
    one.work()
    one.engine.obey(after_loss(plan, {"w1"}))
    ahead = one.inside.executor.cells[SHADOWED].ahead
    assert ahead is not None
    assert set(ahead.outputs) == {0, 1, 2}
    one.work()
    forwards = [m for name, m in names(one) if name == "Forward"]
    assert forwards[:3] == [0, 1, 2], "they are done at once, and their outputs sent"
    assert [m for peer, kind, m in one.sent() if (peer, kind) == ("w2", FrameKind.ACTIVATION)][:3] == [0, 1, 2]


def gradient(step: int, epoch: int = THREE.epoch, cell: Cell = SHADOWED) -> Frame:
    return Frame(address=Address(FrameKind.GRADIENT, *cell, step, 0), epoch=epoch, tensors=(torch.ones(1, 3),))


def test_gradients_are_kept_for_shadowed_cells_until_their_step_is_committed() -> None:
    one = OneEngine("w0", mode(RedundancyMode.EAGER_BACKWARD))
    redundant = one.inside.redundant
    assert redundant.wants(gradient(0))
    assert not redundant.wants(gradient(0, cell=Cell(0, 2))), "another worker is its shadow"
    assert not redundant.wants(gradient(0, cell=Cell(7, 1))), "there is no such cell"
    assert not redundant.wants(gradient(0, THREE.epoch + 1)), "by the next plan this worker may run it"
    for step in (0, 1):
        redundant.keep(gradient(step))
    commit = Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=THREE.epoch)
    one.get(FrameKind.COMMIT, ROOT, payload=commit)
    assert [address.step for address in redundant.mirrored] == [1]


def test_another_plan_drops_what_is_shadowed_no_more_and_measures_anew() -> None:
    plan = mode(RedundancyMode.EAGER_BACKWARD)
    one = OneEngine("w0", plan)
    one.work()
    assert one.inside.redundant.budget.measures(1)
    one.engine.obey(after_loss(plan, {"w1"}))
    assert one.inside.redundant.shadows == {}
