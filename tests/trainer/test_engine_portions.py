"""Portions (shares of another worker's cell): begun, continued and dropped; and rehearsals of replicated stages."""

import msgspec
import pytest

from bamboo_core.job.spec import RedundancyMode, RedundancySpec
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.grid import initial_plan
from bamboo_core.planning.plan import Assignment, Cell, Peer, Plan, Portion
from bamboo_trainer.engine.cell_step import CellStep
from bamboo_trainer.engine.portions import KeptSums, Pace, PortionSteps
from bamboo_trainer.engine.rehearsals import PERIOD
from bamboo_trainer.engine.stage_times import StageTimer
from bamboo_trainer.frames import Address, Commit, Frame, FrameKind
from engine_kit import THREE, OneEngine

SPEC = TrainingSpec(steps=9, global_batch_size=8, micro_batch_size=1, gradient_groups=8)
NONE = RedundancySpec(mode=RedundancyMode.NONE)
PEERS = [Peer(worker=f"w{i}", host="h", port=1) for i in range(2)]
ALONE = initial_plan(PEERS, ((0, 3),), 2, SPEC, RedundancySpec())


def shared(first: int) -> Plan:
    """Return a plan in which two workers divide the microbatch groups of the second cell.

    first: the number of groups that the cell's owner runs; the other worker runs the rest.
    """
    owner, other = (ALONE.at(Cell(d, 0)).owner for d in (1, 0))
    portions = (Portion(worker=owner, first=0, end=first), Portion(worker=other, first=first, end=4))
    row = (msgspec.structs.replace(ALONE.at(Cell(1, 0)), portions=portions),)
    return msgspec.structs.replace(ALONE, epoch=ALONE.epoch + 1, pipelines=(ALONE.pipelines[0], row))


def made(plan: Plan, worker: str = ALONE.at(Cell(0, 0)).owner) -> tuple[OneEngine, PortionSteps]:
    """Return a worker, by default the owner of the first cell, and its portions."""
    one = OneEngine(worker, plan)
    return one, one.inside.executor.portions


def begun(portions: PortionSteps) -> list[tuple[Cell, tuple[int, int]]]:
    portions.refresh()
    return list(portions.steps)


def test_a_boundary_tensor_goes_to_who_runs_its_microbatch_when_the_plan_changes() -> None:
    (one, portions), first = made(shared(1)), ALONE.target.split[1][0]
    cells = one.inside.executor.cells
    mine, early = (Frame(address=Address(FrameKind.GRADIENT, 1, 0, s, first + 1), epoch=1) for s in (0, 1))
    other = Frame(address=Address(FrameKind.GRADIENT, 1, 0, 0, first), epoch=1)
    assert (portions.accept(mine), portions.accept(early), portions.accept(other)) == (True, True, False)
    (step,) = portions.steps.values()
    assert list(step.inbox.values()) == [mine]
    one.inside.plan.activate(ALONE)
    owned = cells[Cell(1, 0)] = CellStep(Cell(1, 0), step=0)
    assert begun(portions) == []
    assert list(owned.inbox.values()) == [early]
    cells.clear()
    assert not portions.accept(early)
    one.inside.plan.activate(shared(1))
    one.inside.committer.log.record(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=1))
    assert not portions.accept(mine), "of a committed step"


# Pipeline 1 loses the last stage's owner. Pipeline 0's last owner is the heir; pipeline 1's first one keeps the sums.
FOUR = initial_plan([Peer(worker=f"w{i}", host="h", port=1) for i in range(4)], ((0, 2), (2, 3)), 2, SPEC, NONE)
LOST, KEEPER, HEIR = Cell(1, 1), FOUR.at(Cell(1, 0)).owner, FOUR.at(Cell(0, 1)).owner
TAKEN = Assignment(owner=HEIR, portions=(Portion(worker=HEIR, first=0, end=4),))
AFTER = msgspec.structs.replace(
    FOUR,
    epoch=2,
    pipelines=(FOUR.pipelines[0], (FOUR.pipelines[1][0], TAKEN)),
    workers=tuple(peer for peer in FOUR.workers if peer.worker != FOUR.at(LOST).owner),
)


def after_loss(worker: str) -> tuple[OneEngine, PortionSteps]:
    one, portions = made(FOUR, worker)
    one.inside.plan.activate(AFTER)
    portions.take_over(FOUR)
    return one, portions


def test_a_new_owner_waits_for_the_keepers_sums_before_it_runs_the_first_portion() -> None:
    whole = (LOST, (first := FOUR.target.split[1][0], first + 4))
    (_, waiting), (one, again) = after_loss(HEIR), after_loss(HEIR)
    assert begun(waiting) == []
    waiting.kept_all(Frame(address=Address(FrameKind.KEPT_ALL, *LOST, 0), epoch=2))
    assert begun(waiting) == [whole]
    moved = msgspec.structs.replace(FOUR.at(Cell(1, 0)), owner=HEIR)
    alone = tuple(peer for peer in AFTER.workers if peer.worker != KEEPER)
    one.inside.plan.activate(
        msgspec.structs.replace(AFTER, epoch=3, pipelines=(FOUR.pipelines[0], (moved, TAKEN)), workers=alone)
    )
    again.await_kept(AFTER, {Cell(1, 0)})
    assert begun(again) == [whole], "the keeper is lost, too, and gives nothing"


def test_a_keeper_gives_nothing_for_a_cell_that_the_plan_no_longer_has() -> None:
    """A worker that keeps finished sums gives none for a cell that the plan in force has removed."""
    one, portions = after_loss(KEEPER)
    gives = [frame.address for _, frame in one.net.take() if frame.address.kind is FrameKind.KEPT_ALL]
    assert gives == [Address(FrameKind.KEPT_ALL, *LOST, 0)]
    one.inside.plan.activate(msgspec.structs.replace(AFTER, epoch=4, pipelines=AFTER.pipelines[:1]))
    one.inside.executor.cells.clear()
    portions.take_over(AFTER)
    assert not one.net.take()


def test_a_portion_whose_sum_the_owner_has_is_not_run() -> None:
    one, portions = made(shared(1))
    (key,) = begun(portions)
    cell, microbatches = key
    owner = one.inside.plan.owner(cell)
    first = portions.steps[key]
    portions.summed(owner, Address(FrameKind.SUMMED, *cell, 1, *microbatches))
    portions.summed(one.worker, Address(FrameKind.SUMMED, *cell, 0, *microbatches))
    assert portions.steps[key] is first, "of another step, and not from the owner"
    portions.summed(owner, Address(FrameKind.SUMMED, *cell, 0, *microbatches))
    assert begun(portions) == [key]
    assert portions.steps[key].next is None
    portions.await_kept(ALONE, {cell})
    portions.steps.clear()
    assert begun(portions) == [key]
    assert portions.steps[key].next is not None, "its owner may be another one"


def test_an_owner_adds_up_the_sums_that_are_here_and_awaits_the_others() -> None:
    """An owner combines the kept sums of a portion once they cover it without a gap. The test keeps sums of the first
    group, of the two groups after it, of the second group (a part of that sum), and at last of the fourth group.
    """
    plan, cell, first = shared(1), Cell(1, 0), ALONE.target.split[1][0]
    one, portions = made(plan, plan.at(cell).owner)
    owned = CellStep(cell, 0, ALONE.target, portions=plan.at(cell).portions)
    assert portions.covered(owned) == ([(first, first + 1), (first + 1, first + 4)], [], [])
    for part in ((0, 1), (1, 3), (1, 2)):
        portions.kept.keep(Frame(address=Address(FrameKind.KEPT_SUM, *cell, 0, *(first + m for m in part)), epoch=1))
    parts, here, found = portions.covered(owned)
    assert parts == [(first, first + 1), (first + 1, first + 4)]
    assert ([frame.address.part - first for frame in here], [worker for worker, _ in found]) == ([1], [one.worker])
    portions.kept.keep(Frame(address=Address(FrameKind.KEPT_SUM, *cell, 0, first + 3, first + 4), epoch=1))
    parts, here, found = portions.covered(owned)
    assert parts == [(first, first + 1), (first + 1, first + 3), (first + 3, first + 4)]
    assert (len(here), [of for _, of in found]) == (3, [(first, first + 1), (first + 1, first + 4)])


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
    """`Pace` lets sums be in transit half of the time at most. lasts: for how many microbatches each is in transit."""
    pace, until, sent = Pace(), 0, 0
    for microbatch in range(100):
        if pace.allows(is_sending=microbatch < until):
            sent, until = sent + 1, microbatch + 1 + lasts
    assert sent == -(-100 // (2 * lasts + 1))


def names(one: OneEngine) -> list[tuple[str, int]]:
    return [(name, m) for name, cell, m in one.did if cell == BEHIND]


@pytest.mark.parametrize(("mode", "expected"), [("None", []), ("Replicas", [("Rehearsal", 0)])])
def test_the_stage_behind_is_tried_once_if_it_is_held_here(mode: str, expected: list[object]) -> None:
    """A worker with a replica of the next stage rehearses that stage once, so that a first run delays no takeover."""
    rows = tuple(msgspec.structs.replace(row, replicas=()) for row in THREE.pipelines[0])
    bare = msgspec.structs.replace(THREE, mode=RedundancyMode.NONE, pipelines=(rows,))
    one = OneEngine("w0", bare if mode == "None" else THREE)
    one.work()
    assert names(one) == expected


def test_nothing_is_tried_out_in_a_step_in_which_roles_have_changed() -> None:
    """A worker rehearses nothing in a step in which roles have changed, since others may wait for its repetitions."""
    calm, changed = OneEngine("w2", THREE), OneEngine("w2", THREE)
    changed.engine.obey(msgspec.structs.replace(THREE, epoch=THREE.epoch + 1))
    assert calm.work() == [("Rehearsal", 0)]
    assert changed.work() == []


def test_now_and_then_a_forward_of_the_stage_behind_is_timed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every PERIOD steps, w2 measures each layer of stage 0, of which it has a replica, to compare the workers."""
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
