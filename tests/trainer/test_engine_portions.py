"""Portions of other workers' cells, begun, continued and dropped; and rehearsals of replicated stages."""

from collections import deque
from typing import Any

import msgspec
import pytest
import torch

from bamboo_core.job.spec import RedundancyMode, RedundancySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Assignment, Cell, Layout, Peer, Plan, Portion
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.replication import Replicator
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.portions import KeptSums, Pace, PortionSteps
from bamboo_trainer.engine.rehearsals import PERIOD
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.frames import Address, Commit, Frame, FrameKind
from bamboo_trainer.routing import Outbox, PlanState
from engine_kit import THREE, OneEngine
from recording_transport import RecordingTransport, Told
from stage_kit import states_of

SPEC = TrainingSpec(steps=9, global_batch_size=8, micro_batch_size=1, gradient_groups=8)
NONE = RedundancySpec(mode=RedundancyMode.NONE)
PEERS = [Peer(worker=f"w{i}", host="h", port=1) for i in range(2)]
ALONE = initial_plan(PEERS, ((0, 3),), 2, SPEC, RedundancySpec())


def shared(first: int) -> Plan:
    """The second cell's owner runs the first of its four groups, and the other worker runs the rest."""
    owner, other = (ALONE.at(Cell(d, 0)).owner for d in (1, 0))
    portions = (Portion(worker=owner, first=0, end=first), Portion(worker=other, first=first, end=4))
    row = (msgspec.structs.replace(ALONE.at(Cell(1, 0)), portions=portions),)
    return msgspec.structs.replace(ALONE, epoch=ALONE.epoch + 1, pipelines=(ALONE.pipelines[0], row))


class One:
    """The owner of the first cell, or another worker. cells: those that it owns. steps: of the job."""

    def __init__(self, plan: Plan, worker: str = ALONE.at(Cell(0, 0)).owner) -> None:
        self.plan, self.known, self.log, self.worker = PlanState(worker, plan), ALONE.target, CommitLog(0), worker
        self.states, self.steps, self.cells = states_of(worker, plan), 9, dict[Cell, CellStep]()
        self.transport = RecordingTransport()
        self.outbox = Outbox(self.plan, self.transport, deque())
        shared: Any = self
        self.committer = self  # which knows layouts
        self.portions = PortionSteps(
            shared, Replicator(self.plan, self.outbox, self.states, shared, Told()), self.cells
        )

    def layout(self, step: int) -> Layout | None:
        return self.known

    def refresh(self) -> list[tuple[Cell, tuple[int, int]]]:
        self.portions.refresh()
        return list(self.portions.steps)


def test_only_what_the_plan_leaves_to_this_worker_is_run() -> None:
    assert One(ALONE).refresh() == []
    first = ALONE.target.split[1][0]
    assert One(shared(1)).refresh() == [(Cell(1, 0), (first + 1, first + 4))]
    assert One(shared(3)).refresh() == [(Cell(1, 0), (first + 3, first + 4))]


def test_what_is_begun_is_gone_on_with_until_the_step_or_the_portion_is_another_one() -> None:
    one = One(shared(1))
    (key,) = one.refresh()
    begun = one.portions.steps[key]
    assert one.refresh() == [key]
    assert one.portions.steps[key] is begun
    one.states.keep_final(0, 0, torch.zeros(one.states[0].size))
    one.states.apply(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=1))
    assert one.refresh() == [key]
    assert one.portions.steps[key] is not begun
    assert one.portions.steps[key].step == 1
    one.plan.activate(shared(2))
    (other,) = one.refresh()
    assert other != key


def test_a_boundary_tensor_goes_to_who_runs_its_microbatch_when_the_plan_changes() -> None:
    one, first = One(shared(1)), ALONE.target.split[1][0]
    one.refresh()
    mine, early = (Frame(address=Address(FrameKind.GRADIENT, 1, 0, s, first + 1), epoch=1) for s in (0, 1))
    other = Frame(address=Address(FrameKind.GRADIENT, 1, 0, 0, first), epoch=1)
    assert (one.portions.accept(mine), one.portions.accept(early), one.portions.accept(other)) == (True, True, False)
    (begun,) = one.portions.steps.values()
    assert list(begun.inbox.values()) == [mine]
    one.plan.activate(ALONE)
    owned = one.cells[Cell(1, 0)] = CellStep(Cell(1, 0), step=0)
    assert one.refresh() == []
    assert list(owned.inbox.values()) == [early]
    one.cells.clear()
    assert not one.portions.accept(early)


def test_of_a_committed_step_nothing_is_taken() -> None:
    one = One(shared(1))
    one.refresh()
    one.log.record(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=1))
    address = Address(FrameKind.GRADIENT, 1, 0, 0, ALONE.target.split[1][0] + 1)
    assert not one.portions.accept(Frame(address=address, epoch=1))


def test_nothing_is_run_after_the_last_step_nor_while_the_layout_is_on_its_way() -> None:
    one = One(shared(1))
    one.steps = 0
    assert one.refresh() == []
    one.steps, one.known = 9, None  # type: ignore[assignment]
    assert one.refresh() == []


def test_a_new_owner_waits_for_the_keepers_sums_before_it_runs_the_first_portion() -> None:
    """The other pipeline's owner of the last stage takes it over; the owner of the first stage keeps its sums."""
    plan = initial_plan([Peer(worker=f"w{i}", host="h", port=1) for i in range(4)], ((0, 2), (2, 3)), 2, SPEC, NONE)
    cell, first = Cell(1, 1), plan.target.split[1][0]
    heir, keeper, lost = plan.at(Cell(0, 1)).owner, plan.at(Cell(1, 0)).owner, plan.at(cell).owner
    taken = Assignment(owner=heir, portions=(Portion(worker=heir, first=0, end=4),))
    rows, left = (plan.pipelines[0], (plan.pipelines[1][0], taken)), [p for p in plan.workers if p.worker != lost]
    after = msgspec.structs.replace(plan, epoch=2, pipelines=rows, workers=tuple(left))
    one = One(plan, heir)
    one.plan.activate(after)
    one.portions.await_kept(plan, {cell})
    assert one.refresh() == []
    one.portions.kept_all(Frame(address=Address(FrameKind.KEPT_ALL, *cell, 0), epoch=2))
    assert one.refresh() == [(cell, (first, first + 4))]
    moved = msgspec.structs.replace(plan.at(Cell(1, 0)), owner=heir)
    alone = tuple(peer for peer in left if peer.worker != keeper)
    beside = msgspec.structs.replace(after, epoch=3, pipelines=(plan.pipelines[0], (moved, taken)), workers=alone)
    again = One(plan, heir)
    again.plan.activate(after)
    again.portions.await_kept(plan, {cell})
    again.plan.activate(beside)
    again.portions.await_kept(after, {Cell(1, 0)})
    assert again.refresh() == [(cell, (first, first + 4))], f"{keeper} is lost, too, and gives nothing"


def test_a_keeper_gives_nothing_for_a_cell_that_the_plan_no_longer_has() -> None:
    """The boundary plan that removed the cell has not taken effect here, only the plan after it."""
    plan = initial_plan([Peer(worker=f"w{i}", host="h", port=1) for i in range(4)], ((0, 2), (2, 3)), 2, SPEC, NONE)
    cell, heir, lost = Cell(1, 1), plan.at(Cell(0, 1)).owner, plan.at(Cell(1, 1)).owner
    taken = Assignment(owner=heir, portions=(Portion(worker=heir, first=0, end=4),))
    rows, left = (plan.pipelines[0], (plan.pipelines[1][0], taken)), [p for p in plan.workers if p.worker != lost]
    after = msgspec.structs.replace(plan, epoch=2, pipelines=rows, workers=tuple(left))
    giver = One(plan, plan.at(Cell(1, 0)).owner)
    giver.plan.activate(after)
    giver.portions.take_over(plan)
    assert [frame.address for _, frame in giver.transport.take()] == [Address(FrameKind.KEPT_ALL, *cell, 0)]
    giver.plan.activate(msgspec.structs.replace(after, epoch=4, pipelines=after.pipelines[:1]))
    giver.portions.take_over(after)
    assert not giver.transport.take()


def test_a_portion_whose_sum_the_owner_has_is_not_run() -> None:
    one = One(shared(1))
    (key,) = one.refresh()
    cell, microbatches = key
    owner = one.plan.owner(cell)
    begun = one.portions.steps[key]
    one.portions.summed(owner, Address(FrameKind.SUMMED, *cell, 1, *microbatches))
    one.portions.summed(one.worker, Address(FrameKind.SUMMED, *cell, 0, *microbatches))
    assert one.portions.steps[key] is begun, "of another step, and not from the owner"
    one.portions.summed(owner, Address(FrameKind.SUMMED, *cell, 0, *microbatches))
    assert one.refresh() == [key]
    assert one.portions.steps[key].next is None
    one.portions.await_kept(ALONE, {cell})
    one.portions.steps.clear()
    assert one.refresh() == [key]
    assert one.portions.steps[key].next is not None, "its owner may be another one"


def test_an_owner_adds_up_the_sums_that_are_here_and_awaits_the_others() -> None:
    """Sums of the first group, of the two behind it, and of the second: it is part of another one."""
    plan, cell, first = shared(1), Cell(1, 0), ALONE.target.split[1][0]
    one = One(plan, plan.at(cell).owner)
    owned = CellStep(cell, 0, ALONE.target, portions=plan.at(cell).portions)
    assert one.portions.covered(owned) == ([(first, first + 1), (first + 1, first + 4)], [], [])
    for part in ((0, 1), (1, 3), (1, 2)):
        one.portions.kept.keep(
            Frame(address=Address(FrameKind.KEPT_SUM, *cell, 0, *(first + m for m in part)), epoch=1)
        )
    parts, here, portions = one.portions.covered(owned)
    assert parts == [(first, first + 1), (first + 1, first + 4)]
    assert ([frame.address.part - first for frame in here], [worker for worker, _ in portions]) == ([1], [one.worker])
    one.portions.kept.keep(Frame(address=Address(FrameKind.KEPT_SUM, *cell, 0, first + 3, first + 4), epoch=1))
    parts, here, portions = one.portions.covered(owned)
    assert parts == [(first, first + 1), (first + 1, first + 3), (first + 3, first + 4)]
    assert (len(here), [of for _, of in portions]) == (3, [(first, first + 1), (first + 1, first + 4)])


BEHIND = Cell(0, 1)  # w0 runs the first stage


def summed(first: int, end: int, step: int = 4) -> Frame:
    return Frame(address=Address(FrameKind.PARTIAL_SUM, *BEHIND, step, first, end), epoch=1)


def test_kept_sums_are_the_largest_ones_of_the_newest_step_up_to_a_gap() -> None:
    kept = KeptSums()
    for frame in (summed(0, 2), summed(4, 6), summed(4, 5)):
        kept.keep(frame)
    assert kept.of(BEHIND, 4, (0, 8)) == [summed(0, 2)]
    kept.keep(summed(2, 4))
    kept.keep(summed(0, 4))
    assert kept.of(BEHIND, 4, (0, 8)) == [summed(0, 4), summed(4, 6)]
    assert (kept.of(BEHIND, 4, (0, 5)), kept.of(BEHIND, 4, (0, 3))) == ([summed(0, 4)], [])
    kept.keep(summed(0, 4, step=5))
    kept.keep(summed(2, 4, step=4))
    kept.committed(4)
    assert (kept.of(BEHIND, 4, (0, 8)), kept.of(BEHIND, 5, (0, 8))) == ([], [summed(0, 4, step=5)])
    kept.committed(5)
    assert kept.of(BEHIND, 5, (0, 8)) == []


@pytest.mark.parametrize("lasts", [0, 1, 2, 5])
def test_a_sum_is_on_its_way_for_half_of_the_time_at_most(lasts: int) -> None:
    """lasts: microbatches for which one is on its way."""
    pace, until, sent = Pace(), 0, 0
    for microbatch in range(100):
        if pace.allows(is_sending=microbatch < until):
            sent, until = sent + 1, microbatch + 1 + lasts
    assert sent == -(-100 // (2 * lasts + 1))


def names(one: OneEngine) -> list[tuple[str, int]]:
    return [(name, m) for name, cell, m in one.did if cell == BEHIND]


@pytest.mark.parametrize(("mode", "expected"), [("None", []), ("Replicas", [("Rehearsal", 0)])])
def test_the_stage_behind_is_tried_once_if_it_is_held_here(mode: str, expected: list[object]) -> None:
    """What runs for the first time is slow, and must not be so in a takeover."""
    rows = tuple(msgspec.structs.replace(row, replicas=()) for row in THREE.pipelines[0])
    bare = msgspec.structs.replace(THREE, mode=RedundancyMode.NONE, pipelines=(rows,))
    one = OneEngine("w0", bare if mode == "None" else THREE)
    one.work()
    assert names(one) == expected


def test_nothing_is_tried_out_in_a_step_in_which_roles_have_changed() -> None:
    """Others may wait for what is repeated then. w2 holds the first stage, whose inputs are always there."""
    calm, changed = OneEngine("w2", THREE), OneEngine("w2", THREE)
    changed.engine.obey(msgspec.structs.replace(THREE, epoch=THREE.epoch + 1))
    assert calm.work() == [("Rehearsal", 0)]
    assert changed.work() == []


def test_now_and_then_a_forward_of_the_stage_behind_is_timed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a step, so that the workers of one pipeline can be compared. w2 holds the first stage."""
    one = OneEngine("w2", THREE)
    one.work()
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(StageTimer, "ran_layer", lambda _, stage, layer, seconds: told.append((stage, layer)))
    stage = one.inside.states.stage(0)
    assert stage is not None
    for step in range(1, PERIOD + 1):
        one.inside.committer.log.newest = step - 1
        stage.values.version = one.inside.executor.cells[Cell(0, 2)].step = step
        assert one.work() == ([("Rehearsal", 0)] if step == PERIOD else []), step
    assert told == [(0, layer) for layer in range(*THREE.stages[0])]
    assert one.work() == []
