"""The next instruction that a worker runs, and the work on a cell that moves to another worker."""

import msgspec
import pytest
import torch

from bamboo_core.job.spec import RedundancyMode
from bamboo_core.planning.plan import ROOT, Assignment, Cell, Plan
from bamboo_trainer.frames import Announce, Commit, FrameKind
from engine_kit import THREE, OneEngine
from replica_kit import in_two_parts

PLAN = msgspec.structs.replace(THREE, mode=RedundancyMode.REPLICAS)
MIDDLE, LAST = Cell(0, 1), Cell(0, 2)


def feed(one: OneEngine, cell: Cell, microbatches: range, step: int = 0) -> None:
    """Deliver the inputs of a cell's forwards in a step, for these microbatches."""
    for m in microbatches:
        one.get(FrameKind.ACTIVATION, cell, torch.full((1, 3), 0.1 * m), microbatch=m, step=step)


def done(one: OneEngine, *names: str) -> list[tuple[str, int]]:
    return [(name, m) for name, m in one.work() if not names or name in names]


def test_forwards_are_run_in_the_programs_order_however_their_inputs_come() -> None:
    one = OneEngine("w1", PLAN)
    assert one.work() == []
    assert one.engine.waits_for() == "ACTIVATION for stage 1 of pipeline 0, step 1, microbatch 0"
    for microbatch in (2, 1):
        one.get(FrameKind.ACTIVATION, MIDDLE, torch.ones(1, 3), microbatch=microbatch)
        assert one.work() == []
    one.get(FrameKind.ACTIVATION, MIDDLE, torch.ones(1, 3), microbatch=0)
    assert done(one, "Forward") == [("Forward", m) for m in range(3)]
    sent = [sent for sent in one.sent() if sent[1] is FrameKind.ACTIVATION]
    assert sent == [("w2", FrameKind.ACTIVATION, m) for m in range(3)]
    assert one.engine.waits_for() == "GRADIENT for stage 1 of pipeline 0, step 1, microbatch 0"


def committed(epoch: int = PLAN.epoch) -> Commit:
    return Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=epoch)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_parts_of_a_stage_are_reported_before_the_replica_has_their_gradients(devices: int) -> None:
    """With two devices, a step of a stage's two parts is committed before the replica has their gradients, since one
    heir repeats both. With one device, the commit waits, since each part is a stage, and the two may have two heirs.
    """
    one = OneEngine("w0", in_two_parts(), devices=devices)
    parts = [Cell(0, part) for part in range(2)]
    for cell in parts:
        one.get(FrameKind.ANNOUNCE, cell, sender="w1", payload=Announce(version=0, secured=0))
    one.get(FrameKind.HEARD, ROOT, sender="w1", payload=[])
    one.work()
    assert one.engine.waits_for() == "a replica of stage 0 of pipeline 0"
    assert one.engine.step == devices - 1, "with two devices the first step is committed"
    assert sum(kind is FrameKind.SYNC for _, kind, _ in one.sent()) == 2 * devices


def announce(one: OneEngine, version: int) -> None:
    """Deliver the announcement that the last stage's replica, w1, has this version."""
    one.get(FrameKind.ANNOUNCE, LAST, sender="w1", payload=Announce(version=version, secured=version))


def test_a_worker_that_lacks_the_roots_plan_begins_no_step_by_the_old_one() -> None:
    one = OneEngine("w1", PLAN)
    feed(one, MIDDLE, range(8))
    for m in range(8):
        one.get(FrameKind.GRADIENT, MIDDLE, torch.ones(1, 3), microbatch=m)
    one.work()
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=PLAN.epoch + 1))
    one.get(FrameKind.ACTIVATION, MIDDLE, torch.ones(1, 3), step=1, microbatch=0)
    assert "OptimizerStep" in [name for name, _ in one.work()]
    assert done(one, "Forward") == []
    one.engine.obey(msgspec.structs.replace(PLAN, epoch=PLAN.epoch + 1, boundary=True))
    assert done(one, "Forward") == [("Forward", 0)]


def moved(cell: Cell, worker: str) -> Plan:
    """Return a boundary plan that gives the cell to `worker`, its replica, and keeps the former owner as replica."""
    row = list(PLAN.pipelines[0])
    row[cell.stage] = Assignment(owner=worker, replicas=(PLAN.at(cell).owner,))
    return msgspec.structs.replace(PLAN, epoch=PLAN.epoch + 1, pipelines=(tuple(row),), boundary=True)


def test_the_last_gradients_of_a_cell_that_moves_are_kept_for_its_next_owner() -> None:
    one, plan = OneEngine("w2", PLAN), moved(LAST, "w1")
    feed(one, LAST, range(8))
    one.work()
    one.engine.obey(plan)
    assert LAST in one.inside.executor.cells, "until the root has committed under the plan"
    one.sent()
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=plan.epoch))
    assert one.inside.executor.cells == {}
    assert one.inside.executor.handed_over.keys() == {LAST}
    one.inside.on_link_up("w1")
    assert [kind for peer, kind, _ in one.sent() if peer == "w1" and kind is FrameKind.SYNC] == [FrameKind.SYNC]
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=plan.epoch), step=1)
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=plan.epoch), step=2)
    assert one.inside.executor.handed_over == {}, "nobody lacks them any more"


def test_its_next_owner_gets_them_though_the_commit_comes_before_they_are_sent() -> None:
    """A step's last gradients, sent after its report, reach the next owner although the commit comes before them."""
    one, plan = OneEngine("w2", PLAN), moved(LAST, "w1")
    announce(one, 0)
    feed(one, LAST, range(8))
    sent: list[tuple[str, FrameKind, int]] = []
    while FrameKind.READY not in [kind for _, kind, _ in sent]:
        assert one.engine.turn()
        sent += one.sent()
    assert FrameKind.SYNC not in [kind for _, kind, _ in sent]
    one.engine.obey(plan)
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=plan.epoch))
    one.work()
    assert [peer for peer, kind, _ in one.sent() if kind is FrameKind.SYNC] == ["w1"]


def test_whoever_takes_a_committed_step_over_waits_for_its_gradients_unless_the_link_breaks() -> None:
    """A new owner repeats a committed step only if a broken link may have lost the former owner's gradients."""
    one, plan = OneEngine("w1", PLAN), moved(LAST, "w1")
    one.engine.obey(plan)
    feed(one, MIDDLE, range(8))
    one.get(FrameKind.COMMIT, ROOT, payload=committed(epoch=plan.epoch))
    assert set(one.inside.executor.cells) == {MIDDLE, LAST}
    feed(one, LAST, range(8))
    one.work()
    assert not [cell for name, cell, _ in one.did if name == "Forward" and cell == LAST]
    assert one.inside.executor.cells[LAST].predecessor == "w2"
    one.inside.on_link_down("w2")
    one.work()
    assert [cell for name, cell, _ in one.did if name == "Forward" and cell == LAST]
