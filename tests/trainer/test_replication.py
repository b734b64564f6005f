"""Replication by a cell's owner: frames to replicas, waits for replicas, and answers about repeated steps."""

import pytest
import torch

from bamboo_core.control.protocol import LeftBehind, Message, ReplicaSynced
from bamboo_core.planning.plan import Cell
from bamboo_trainer.commit.replication import CLOSE_STEPS, PATIENCE_STEPS, Owed, Repeated, ReplicaProgress
from bamboo_trainer.frames import ANSWERS_END, Address, Announce, Commit, Frame, FrameKind
from engine_kit import THREE, OneEngine
from replica_kit import in_two_parts


def filled(at: int = 5) -> ReplicaProgress:
    """Return an owner's record of a replica that got version `at`, and still has it when the owner is at `at` + 4."""
    progress = ReplicaProgress()
    assert progress.announced(-1, -1, at) is Owed.STATE
    assert not any(progress.holds_back(step, strict) for step in range(at, 100) for strict in (False, True))
    assert progress.announced(at, at, at + 4) is Owed.NOTHING
    return progress


def test_one_that_lags_far_behind_is_waited_for_when_it_is_close_or_late() -> None:
    progress = filled()
    assert not progress.holds_back(5 + CLOSE_STEPS + 1, False)
    assert progress.holds_back(5 + CLOSE_STEPS, False)
    assert not progress.holds_back(5 + 4 + PATIENCE_STEPS - 1, False)
    assert progress.holds_back(5 + 4 + PATIENCE_STEPS, False)
    assert not progress.holds_back(5, False), "it holds what this step takes"
    assert progress.relinked(7) is Owed.STATE
    assert not any(progress.holds_back(step, False) for step in range(7, 100)), "its state is on its way again"
    assert progress.announced(7, 7, 9) is Owed.NOTHING
    assert progress.holds_back(9, False)


def test_one_that_is_level_is_counted_once_and_waited_for_until_it_has_dropped_its_state() -> None:
    progress = filled()
    progress.announced(9, 9, 9)
    assert progress.synced
    assert progress.holds_back(10, False)
    assert not progress.holds_back(9, False)
    assert progress.holds_back(9, True), "it has not got this step's gradients"
    assert progress.announced(-1, -1, 10) is Owed.STATE, "it was no replica for a plan that the owner has missed"
    assert not progress.holds_back(10, True)
    assert progress.announced(-1, -1, 11) is Owed.NOTHING, "it is on its way"
    assert progress.announced(11, 11, 11) is Owed.NOTHING
    assert progress.synced


@pytest.mark.parametrize(
    ("version", "secured", "mine", "owed"),
    [
        (4, 4, 5, Owed.STATE),
        (4, 5, 5, Owed.GRADIENTS),  # it had them before the last owner was lost; a whole state would take long
        (6, 6, 5, Owed.GRADIENTS),  # nobody sends it again what the owner has from the one before
    ],
)
def test_what_a_new_owner_sends_to_one_that_has_a_state(version: int, secured: int, mine: int, owed: Owed) -> None:
    progress = ReplicaProgress()
    assert progress.announced(version, secured, mine) is owed
    if secured >= mine:
        assert progress.announced(version, secured, mine + 1) is Owed.NOTHING, "it gets all gradients from now on"
    assert progress.announced(mine + 1, mine + 1, mine + 1) is Owed.NOTHING
    assert progress.synced


def test_one_that_has_what_it_needs_and_no_time_to_apply_it_is_waited_for() -> None:
    """An owner waits for a replica that gets all gradients, but whose worker has no idle time to apply them."""
    progress = ReplicaProgress()
    assert progress.announced(22, 23, 23) is Owed.GRADIENTS
    assert progress.holds_back(24, False)
    assert progress.announced(22, 23, 39) is Owed.NOTHING
    assert progress.holds_back(39, False)


CELL = Cell(0, 2)
OWNER, REPLICA = THREE.at(CELL).owner, THREE.at(CELL).replicas[0]
COMMIT = Commit(norm=1.0, loss=1.0, microbatches=3, generation=0, epoch=1)


def sent(one: OneEngine) -> list[tuple[str, Frame]]:
    """Send the gradients that a worker owes, as it does when idle. Return all frames sent since the last call."""
    while one.inside.replicator.owes_gradients:
        one.inside.replicator.send_next()
    return one.net.take()


def kinds(one: OneEngine) -> list[tuple[str, FrameKind]]:
    return [(peer, frame.address.kind) for peer, frame in sent(one)]


def said(one: OneEngine, kind: type[Message]) -> list[Message]:
    return [message for message in one.said if isinstance(message, kind)]


def announce(one: OneEngine, cell: Cell, replica: str, version: int, *, epoch: int = 1) -> None:
    one.inside.replicator.announced(cell, replica, epoch, Announce(version=version, secured=version))


def finalize(one: OneEngine, stage: int) -> None:
    one.inside.replicator.finalize(stage, 0, torch.ones(one.inside.states[stage].size))


def layers_of(one: OneEngine, cell: Cell) -> list[Frame]:
    """Send a cell's whole state to w1. Return its frames."""
    one.inside.replicator.send_state(cell, "w1")
    return [frame for _, frame in sent(one)]


def test_what_a_replica_sent_before_it_obeyed_the_plan_does_not_count() -> None:
    owner = OneEngine(OWNER)
    announce(owner, CELL, REPLICA, 0, epoch=0)
    assert (sent(owner), said(owner, ReplicaSynced), list(owner.inside.replicator.synced())) == ([], [], [])


def test_what_was_sent_over_a_link_that_broke_is_sent_again() -> None:
    owner = OneEngine(OWNER)
    announce(owner, CELL, REPLICA, 0)
    finalize(owner, 2)
    assert kinds(owner) == [(REPLICA, FrameKind.SYNC)]
    finalize(owner, 2)
    assert sent(owner) == [], "it is known"
    owner.inside.replicator.relinked("somebody else")
    assert sent(owner) == []
    owner.inside.replicator.relinked(REPLICA)
    assert kinds(owner) == [(REPLICA, FrameKind.SYNC)]


# a stage in two parts, on two devices of a worker, and its replica on another one

PARTS = range(2)


def divided(worker: str) -> OneEngine:
    return OneEngine(worker, in_two_parts(), devices=2)


def after_a_step(owner: OneEngine) -> OneEngine:
    for part in PARTS:
        finalize(owner, part)
        owner.inside.states.apply(part, COMMIT)
    return owner


def taken(one: OneEngine) -> list[int]:
    """Restore all arrived states that may be restored now. Return their stages."""
    found = iter(one.inside.replicator.next_state, None)
    return [state.cell.stage for state in found if state and one.inside.replicator.restore(state)]


def test_a_replica_is_in_step_when_all_parts_are_at_the_owners_newest_version() -> None:
    """A replica is in step once all parts have the owner's newest version; else it could not repeat a step."""
    owner = divided("w0")
    announce(owner, Cell(0, 0), "w1", 0)
    assert said(owner, ReplicaSynced) == [], "nothing is known of the other part"
    after_a_step(owner)
    announce(owner, Cell(0, 1), "w1", 1)
    assert said(owner, ReplicaSynced) == [], "the first part's gradients may be lost on their way"
    announce(owner, Cell(0, 0), "w1", 1)
    assert said(owner, ReplicaSynced) == [ReplicaSynced(cell=Cell(0, 0), replica="w1")]
    assert list(owner.inside.replicator.synced()) == [(Cell(0, part), "w1") for part in PARTS]


def test_a_replica_takes_a_state_over_when_all_parts_can_come_to_its_version() -> None:
    owner = after_a_step(divided("w0"))
    layers = [layers_of(owner, Cell(0, part)) for part in PARTS]
    replica, later = divided("w1"), divided("w1")
    for frame in layers[1]:
        replica.inside.replicator.layer_arrived(frame)
    assert taken(replica) == [], "if the owner is lost now, both parts repeat the step"
    replica.inside.replicator.take_roles(in_two_parts())
    finalize(replica, 0)
    assert taken(replica) == [1], "the other part can go on by itself"
    assert replica.inside.states[1].digest() == owner.inside.states[1].digest()
    for frame in (*layers[1], *layers[0]):
        later.inside.replicator.layer_arrived(frame)
    assert sorted(taken(later)) == [0, 1]


def test_a_state_is_taken_over_once_all_its_layers_are_here_also_if_the_plan_changes_meanwhile() -> None:
    owner, replica = OneEngine("w0", in_two_parts()), OneEngine("w1", in_two_parts())
    older = layers_of(owner, Cell(0, 1))
    first, last = layers_of(after_a_step(owner), Cell(0, 1))
    for frame in (first, *older, first):
        replica.inside.replicator.layer_arrived(frame)
    replica.inside.replicator.take_roles(in_two_parts())
    assert taken(replica) == [], "layers of an older version do not count"
    replica.inside.replicator.layer_arrived(last)
    assert taken(replica) == [1]
    assert replica.inside.states[1].digest() == owner.inside.states[1].digest()


# the owner of a stage in the middle, which repeats a committed step

MIDDLE = Cell(0, 1)
OTHERS = sorted(THREE.worker_ids() - {THREE.at(MIDDLE).owner})
ACTIVATION, GRADIENT = (Address(kind, *MIDDLE, 5) for kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT))


def repeating(newest: int = 5) -> OneEngine:
    one = OneEngine(THREE.at(MIDDLE).owner)
    for step in range(newest + 1):
        one.inside.committer.log.record(step, COMMIT)
    return one


def look(one: OneEngine, *lacks: Address) -> list[Message]:
    one.inside.repeated.look([Repeated(MIDDLE, 5, lacks)], {})
    return said(one, LeftBehind)


def answer(one: OneEngine, since: dict[Cell, int], epoch: int = THREE.epoch) -> list[bool]:
    """Give each other worker's answer on each link; return whether it was awaited. since: first logged step by cell."""
    frames = [
        Frame(address=Address(kind, *MIDDLE, 5), epoch=epoch, payload=list(since.items())) for kind in ANSWERS_END
    ]
    return [one.inside.repeated.answered(worker, frame) for worker in OTHERS for frame in frames]


def test_everybody_is_asked_once_in_an_epoch_and_again_after_a_link_broke() -> None:
    one = repeating()
    assert not any(answer(one, {})), "nothing was asked"
    for _ in range(2):
        assert look(one, ACTIVATION) == []
    assert kinds(one) == [(worker, FrameKind.ASK) for worker in OTHERS]
    assert not any(answer(one, {Cell(0, 0): 6}, epoch=THREE.epoch + 1))
    one.inside.repeated.ask_again()
    assert look(one, ACTIVATION) == []
    assert len(sent(one)) == len(OTHERS)


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
    one = repeating()
    assert look(one, lacks) == []
    assert all(answer(one, since))
    assert look(one, lacks) == ([LeftBehind(cell=MIDDLE)] if left_behind else [])


def test_two_steps_behind_nobody_can_help() -> None:
    assert look(repeating(newest=6)) == [LeftBehind(cell=MIDDLE)]


def test_whoever_is_asked_sends_what_its_log_has_and_says_that_this_was_all() -> None:
    one = repeating()
    one.inside.outbox.emit(Address(FrameKind.ACTIVATION, 0, 2, 5))
    one.net.take()
    one.inside.repeated.answer("w9", CELL, 5, {MIDDLE: 4})
    frames = one.net.take()
    assert [(peer, f.address.kind) for peer, f in frames] == [("w9", k) for k in (FrameKind.ACTIVATION, *ANSWERS_END)]
    assert [frame.payload for _, frame in frames[1:]] == [[(MIDDLE, 4)]] * 3
