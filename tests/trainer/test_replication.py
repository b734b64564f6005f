"""Replicas: what a cell's owner sends them, when it waits for them, and whom owners ask when they repeat a step."""

from collections import deque

import pytest
import torch

from bamboo_core.control.protocol import LeftBehind, ReplicaSynced
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.commit.commit_log import CommitLog
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.ports import NoHistory
from bamboo_trainer.commit.replication import (
    CLOSE_STEPS,
    PATIENCE_STEPS,
    Owed,
    Repeated,
    RepeatedSteps,
    ReplicaProgress,
    Replicator,
)
from bamboo_trainer.frames import ANSWERS_END, Address, Announce, Commit, Frame, FrameKind
from bamboo_trainer.routing import Outbox, PlanState
from bamboo_trainer.stage.stage_states import StageStates
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from recording_transport import RecordingTransport, Told
from replica_kit import in_two_parts, planned
from stage_kit import StagesOfTask, small_task, states_of
from training_job import Job


def filled(at: int = 5) -> ReplicaProgress:
    """A replica that has been given version `at`, and holds it."""
    progress = ReplicaProgress()
    assert progress.announced(-1, -1, at) is Owed.STATE
    assert progress.announced(at, at, at + 4) is Owed.NOTHING
    return progress


def test_a_replica_without_a_state_holds_nobody_back() -> None:
    progress = ReplicaProgress()
    progress.announced(-1, -1, 5)
    assert not any(progress.holds_back(step, strict) for step in range(5, 100) for strict in (False, True))


def test_one_that_lags_far_behind_is_waited_for_when_it_is_close_or_late() -> None:
    progress = filled()
    assert not progress.holds_back(5 + CLOSE_STEPS + 1, False)
    assert progress.holds_back(5 + CLOSE_STEPS, False)
    assert not progress.holds_back(5 + 4 + PATIENCE_STEPS - 1, False)
    assert progress.holds_back(5 + 4 + PATIENCE_STEPS, False)
    assert not progress.holds_back(5, False), "it holds what this step takes"


def test_one_whose_state_is_on_its_way_again_holds_nobody_back() -> None:
    progress = filled()
    assert progress.relinked(7) is Owed.STATE
    assert not any(progress.holds_back(step, False) for step in range(7, 100))
    assert progress.announced(7, 7, 9) is Owed.NOTHING
    assert progress.holds_back(9, False)


def test_one_that_is_level_is_counted_once_and_waited_for_from_then_on() -> None:
    progress = filled()
    progress.announced(9, 9, 9)
    assert [progress.caught_up(9), progress.caught_up(9)] == [True, False]
    assert progress.holds_back(10, False)
    assert not progress.holds_back(9, False)
    assert progress.holds_back(9, True), "it has not got this step's gradients"


def test_one_that_can_reach_its_new_owners_version_alone_is_given_gradients_only() -> None:
    """It had the gradients before the last owner was lost; a whole state would take long."""
    progress = ReplicaProgress()
    assert progress.announced(4, 5, 5) is Owed.GRADIENTS
    assert progress.announced(4, 5, 6) is Owed.NOTHING, "it is on its way, and gets all gradients"
    assert progress.announced(6, 6, 6) is Owed.NOTHING
    assert progress.caught_up(6)
    assert ReplicaProgress().announced(4, 4, 5) is Owed.STATE


def test_one_that_has_what_it_needs_and_no_time_to_apply_it_is_waited_for() -> None:
    """It runs a stage that never waits for another one's, so that it comes to a replica only if the commit waits."""
    progress = ReplicaProgress()
    assert progress.announced(22, 23, 23) is Owed.GRADIENTS
    assert progress.holds_back(24, False)
    assert progress.announced(22, 23, 39) is Owed.NOTHING
    assert progress.holds_back(39, False)


def test_one_that_has_dropped_its_state_is_given_another_one() -> None:
    """It was no replica for a plan that the owner has missed."""
    progress = filled()
    progress.announced(9, 9, 9)
    assert progress.caught_up(9)
    assert progress.announced(-1, -1, 10) is Owed.STATE
    assert not progress.holds_back(10, True)
    assert progress.announced(-1, -1, 11) is Owed.NOTHING, "it is on its way"
    assert progress.announced(11, 11, 11) is Owed.NOTHING
    assert progress.caught_up(11)


def test_one_that_is_ahead_of_its_new_owner_is_given_what_that_has_for_later() -> None:
    """Final gradients that the owner has from the one before it are not sent to anybody again by themselves."""
    assert ReplicaProgress().announced(6, 6, 5) is Owed.GRADIENTS


PLAN = planned(3, 1, 1, "a")
CELL = Cell(0, 2)
OWNER, REPLICA = PLAN.at(CELL).owner, PLAN.at(CELL).replicas[0]
COMMIT = Commit(norm=1.0, loss=1.0, microbatches=3, generation=0, epoch=1)


class One:
    """A worker of the plan with its states of the stages, and what it says."""

    def __init__(self, worker: str, of: Plan = PLAN, devices: int = 1) -> None:
        self.net, self.said = RecordingTransport(), Told()
        plan = PlanState(worker, of, devices)
        outbox = Outbox(plan, self.net, deque())
        self.states = states_of(worker, of)
        committer = Committer(plan, outbox, self.states, Told(), lambda: 0.0, lambda: "a", NoHistory())
        self.replicator = Replicator(plan, outbox, self.states, committer, self.said)
        self.replicator.take_roles(None)

    def sent(self) -> list[tuple[str, Frame]]:
        """With the gradients that it sends when nothing else is to be done."""
        while self.replicator.owes_gradients:
            self.replicator.send_next()
        return self.net.take()

    def addresses(self) -> list[tuple[str, Address]]:
        return [(peer, frame.address) for peer, frame in self.sent()]

    def kinds(self) -> list[tuple[str, FrameKind]]:
        return [(peer, address.kind) for peer, address in self.addresses()]

    def layers_of(self, cell: Cell) -> list[Frame]:
        """The frames of the cell's whole state."""
        self.replicator.send_state(cell, "w1")
        return [frame for _, frame in self.sent()]

    def announce(self, version: int, *, epoch: int = 1) -> None:
        self.replicator.announced(CELL, REPLICA, epoch, Announce(version=version, secured=version))


def test_what_a_replica_said_before_it_obeyed_the_plan_does_not_count() -> None:
    owner = One(OWNER)
    owner.announce(0, epoch=0)
    assert (owner.sent(), owner.said, list(owner.replicator.synced())) == ([], [], [])


def test_what_was_sent_over_a_link_that_broke_is_sent_again() -> None:
    owner = One(OWNER)
    owner.announce(0)
    held = owner.states[2]
    owner.replicator.finalize(2, 0, torch.zeros(held.size))
    assert owner.kinds() == [(REPLICA, FrameKind.SYNC)]
    owner.replicator.finalize(2, 0, torch.zeros(held.size))
    assert owner.sent() == [], "it is known"
    owner.replicator.relinked("somebody else")
    assert owner.sent() == []
    owner.replicator.relinked(REPLICA)
    assert owner.kinds() == [(REPLICA, FrameKind.SYNC)]


def test_whoever_runs_the_cell_from_now_on_gets_what_it_was_still_to_get() -> None:
    owner = One(OWNER)
    owner.announce(0)
    owner.replicator.finalize(2, 0, torch.zeros(owner.states[2].size))
    assert owner.net.take() == [], "it is sent when nothing else is to be done"
    kept = owner.replicator.hand_over(CELL, REPLICA, 0)
    assert owner.kinds() == [(REPLICA, FrameKind.SYNC)]
    assert kept.address == Address(FrameKind.SYNC, *CELL, 0)
    owner.replicator.hand_over(CELL, REPLICA, 0)
    assert owner.sent() == [], "it has been sent"


REPORTED = 3  # steps that all workers report with replicas in step


def test_ready_goes_before_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    document = bamboojob(task=gpt_task(context=8), training=training(6, 4, 2), topology={"stages": 3})
    sent: dict[tuple[WorkerId, int], list[FrameKind]] = {}
    send = MemoryTransport.send

    def noting(self: MemoryTransport, peer: WorkerId, frame: Frame) -> None:
        if frame.address.kind in (FrameKind.READY, FrameKind.SYNC):
            sent.setdefault((self.worker, frame.address.step), []).append(frame.address.kind)
        send(self, peer, frame)

    monkeypatch.setattr(MemoryTransport, "send", noting)
    Job(document).run()
    both = [kinds for kinds in sent.values() if len(set(kinds)) == 2]
    assert len(both) >= 2 * REPORTED, sent
    assert all(kinds[0] is FrameKind.READY for kinds in both), sent


# a stage in two parts, on two devices of a worker, and its replica on another one

DIVIDED = in_two_parts()


def test_a_replica_is_in_step_when_all_parts_are_at_the_owners_newest_version() -> None:
    """At different versions none of them could be repeated after the owner's loss."""
    owner = One("w0", DIVIDED, devices=2)

    def announce(part: int, version: int) -> None:
        owner.replicator.announced(Cell(0, part), "w1", 1, Announce(version=version, secured=version))

    announce(0, 0)
    assert owner.said == [], "nothing is known of the other part"
    for part in range(2):
        held = owner.states[part]
        owner.replicator.finalize(part, 0, torch.ones(held.size))
        owner.states.apply(part, COMMIT)
    announce(1, 1)
    assert owner.said == [], "the first part's gradients may be lost on their way"
    announce(0, 1)
    assert owner.said == [ReplicaSynced(cell=Cell(0, 0), replica="w1")]
    assert list(owner.replicator.synced()) == [(Cell(0, 0), "w1"), (Cell(0, 1), "w1")]


def parts_after_a_step() -> tuple[One, list[list[Frame]]]:
    """The owner, and the layers of each part's state."""
    owner = One("w0", DIVIDED, devices=2)
    for part in range(2):
        owner.replicator.finalize(part, 0, torch.ones(owner.states[part].size))
        owner.states.apply(part, COMMIT)
    return owner, [owner.layers_of(Cell(0, part)) for part in range(2)]


def taken(replicator: Replicator) -> list[int]:
    """The stages whose states may be taken over now."""
    found = iter(replicator.next_state, None)
    return [state.cell.stage for state in found if state and replicator.restore(state)]


def test_a_replica_takes_a_state_over_when_all_parts_can_come_to_its_version() -> None:
    owner, layers = parts_after_a_step()
    replica = One("w1", DIVIDED, devices=2)
    for frame in layers[1]:
        replica.replicator.layer_arrived(frame)
    assert taken(replica.replicator) == [], "if the owner is lost now, both parts repeat the step"
    replica.replicator.take_roles(DIVIDED)
    replica.replicator.finalize(0, 0, torch.ones(replica.states[0].size))
    assert taken(replica.replicator) == [1], "the other part can go on by itself"
    assert replica.states[1].digest() == owner.states[1].digest()
    later = One("w1", DIVIDED, devices=2).replicator
    for frame in (*layers[1], *layers[0]):
        later.layer_arrived(frame)
    assert sorted(taken(later)) == [0, 1]


def test_a_state_is_taken_over_once_all_its_layers_are_here_also_if_the_plan_changes_meanwhile() -> None:
    owner, replica = One("w0", DIVIDED), One("w1", DIVIDED)
    owner.replicator.finalize(1, 0, torch.ones(owner.states[1].size))
    older = owner.layers_of(Cell(0, 1))
    owner.states.apply(1, COMMIT)
    first, last = owner.layers_of(Cell(0, 1))
    for frame in (first, *older, first):
        replica.replicator.layer_arrived(frame)
    replica.replicator.take_roles(DIVIDED)
    assert taken(replica.replicator) == [], "layers of an older version do not count"
    replica.replicator.layer_arrived(last)
    assert taken(replica.replicator) == [1]
    assert replica.states[1].digest() == owner.states[1].digest()


REPEATED_STEPS_CELL = Cell(0, 1)
REPEATED_STEPS_OWNER = PLAN.at(REPEATED_STEPS_CELL).owner
OTHERS = sorted(PLAN.worker_ids() - {REPEATED_STEPS_OWNER})
ACTIVATION, GRADIENT = (Address(kind, *REPEATED_STEPS_CELL, 5) for kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT))


class RepeatedStepsOne:
    """The owner of a stage in the middle; it has no states of its own."""

    def __init__(self, newest: int = 5) -> None:
        self.net, self.said, self.log = RecordingTransport(), Told(), CommitLog(0)
        self.plan = PlanState(REPEATED_STEPS_OWNER, PLAN)
        self.outbox = Outbox(self.plan, self.net, deque())
        for step in range(newest + 1):
            self.log.record(step, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=1))
        states = StageStates(StagesOfTask(small_task()), False, {})
        self.steps = RepeatedSteps(self.plan, self.outbox, states, None, self.log, self.said)  # type: ignore[arg-type]

    def look(self, *lacks: Address) -> None:
        self.steps.look([Repeated(REPEATED_STEPS_CELL, 5, lacks)], {})

    def answer(self, since: dict[Cell, int], epoch: int = PLAN.epoch) -> list[bool]:
        """Everybody's, on every link: the first step in their logs."""
        return [
            self.steps.answered(
                worker, Frame(address=Address(kind, *REPEATED_STEPS_CELL, 5), epoch=epoch, payload=list(since.items()))
            )
            for worker in OTHERS
            for kind in ANSWERS_END
        ]


def test_everybody_is_asked_once_in_an_epoch_and_again_after_a_link_broke() -> None:
    one = RepeatedStepsOne()
    one.look(ACTIVATION)
    one.look(ACTIVATION)
    assert [(peer, frame.address.kind) for peer, frame in one.net.take()] == [(w, FrameKind.ASK) for w in OTHERS]
    one.steps.ask_again()
    one.look(ACTIVATION)
    assert len(one.net.take()) == len(OTHERS)
    assert one.said == []


@pytest.mark.parametrize(
    ("lacks", "since", "left_behind"),
    [
        (ACTIVATION, {Cell(0, 0): 5}, False),  # the stage before has it in its log
        (ACTIVATION, {Cell(0, 0): 6}, True),
        (GRADIENT, {Cell(0, 0): 6}, False),
        (GRADIENT, {Cell(0, 2): 6}, True),
        (ACTIVATION, {}, False),  # who runs that stage now repeats the step as well
    ],
)
def test_what_nobody_has_nor_makes_again_is_told_once_all_have_answered(
    lacks: Address, since: dict[Cell, int], left_behind: bool
) -> None:
    one = RepeatedStepsOne()
    one.look(lacks)
    one.look(lacks)
    assert one.said == [], "they have not answered"
    assert all(one.answer(since))
    one.look(lacks)
    assert one.said == ([LeftBehind(cell=REPEATED_STEPS_CELL)] if left_behind else [])


def test_two_steps_behind_nobody_can_help() -> None:
    one = RepeatedStepsOne(newest=6)
    one.look()
    assert one.said == [LeftBehind(cell=REPEATED_STEPS_CELL)]


def test_answers_to_what_was_not_asked_do_not_count() -> None:
    one = RepeatedStepsOne()
    assert not any(one.answer({}))
    one.look(ACTIVATION)
    assert not any(one.answer({Cell(0, 0): 6}, epoch=PLAN.epoch + 1))
    one.look(ACTIVATION)
    assert one.said == []


def test_whoever_is_asked_sends_what_its_log_has_and_says_that_this_was_all() -> None:
    one = RepeatedStepsOne()
    one.outbox.emit(Address(FrameKind.ACTIVATION, 0, 2, 5))
    one.net.take()
    one.steps.answer("w9", Cell(0, 2), 5, {REPEATED_STEPS_CELL: 4})
    sent = one.net.take()
    assert [frame.address.kind for _, frame in sent] == [FrameKind.ACTIVATION, *ANSWERS_END]
    assert {peer for peer, _ in sent} == {"w9"}
    assert [frame.payload for _, frame in sent[1:]] == [[(REPEATED_STEPS_CELL, 4)]] * 3
