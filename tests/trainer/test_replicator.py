"""Replicas: what the owner of a cell sends them, and when it waits for them."""

from collections import deque

import pytest
import torch

from bamboo_core.control.protocol import ReplicaSynced
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.history import NoHistory
from bamboo_trainer.commit.replicator import Replicator
from bamboo_trainer.frames.frame import Address, Frame, FrameKind
from bamboo_trainer.frames.payloads import Announce, Commit
from bamboo_trainer.routing.outbox import Outbox
from bamboo_trainer.routing.plan_state import PlanState
from manifest_kit import bamboojob, gpt_task, training
from memory_transport import MemoryTransport
from recording_transport import RecordingTransport, Told
from replica_kit import in_two_parts, planned
from stage_kit import states_of
from training_job import Job

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

    def announce(self, version: int, *, secured: int | None = None, digest: str = "", epoch: int = 1) -> None:
        said = Announce(version=version, secured=version if secured is None else secured, digest=digest)
        self.replicator.announced(CELL, REPLICA, epoch, said)


def test_first_states_that_differ_are_replaced() -> None:
    owner = One(OWNER)
    owner.announce(0, digest="other bits")
    layers = range(*PLAN.stages[2])
    assert [(peer, a.kind, a.part) for peer, a in owner.addresses()] == [(REPLICA, FrameKind.LAYER, n) for n in layers]
    same = One(OWNER)
    same.announce(0, digest=same.states[2].digest())
    assert same.sent() == []


def test_what_a_replica_said_before_it_obeyed_the_plan_does_not_count() -> None:
    owner = One(OWNER)
    owner.announce(0, epoch=0)
    assert (owner.sent(), owner.said, list(owner.replicator.synced())) == ([], [], [])


def test_what_was_sent_over_a_link_that_broke_is_sent_again() -> None:
    owner = One(OWNER)
    owner.announce(0, digest=owner.states[2].digest())
    held = owner.states[2]
    owner.replicator.finalize(2, 0, torch.zeros(held.final.size))
    assert owner.kinds() == [(REPLICA, FrameKind.SYNC)]
    owner.replicator.finalize(2, 0, torch.zeros(held.final.size))
    assert owner.sent() == [], "it is known"
    owner.replicator.relinked("somebody else")
    assert owner.sent() == []
    owner.replicator.relinked(REPLICA)
    assert owner.kinds() == [(REPLICA, FrameKind.SYNC)]


def test_whoever_runs_the_cell_from_now_on_gets_what_it_was_still_to_get() -> None:
    owner = One(OWNER)
    owner.announce(0, digest=owner.states[2].digest())
    owner.replicator.finalize(2, 0, torch.zeros(owner.states[2].final.size))
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
        digest = "" if version else owner.states[part].digest()
        said = Announce(version=version, secured=version, digest=digest)
        owner.replicator.announced(Cell(0, part), "w1", 1, said)

    announce(0, 0)
    assert owner.said == [], "nothing is known of the other part"
    for part in range(2):
        held = owner.states[part]
        owner.replicator.finalize(part, 0, torch.ones(held.final.size))
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
        owner.replicator.finalize(part, 0, torch.ones(owner.states[part].final.size))
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
    replica.replicator.finalize(0, 0, torch.ones(replica.states[0].final.size))
    assert taken(replica.replicator) == [1], "the other part can go on by itself"
    assert replica.states[1].digest() == owner.states[1].digest()
    later = One("w1", DIVIDED, devices=2).replicator
    for frame in (*layers[1], *layers[0]):
        later.layer_arrived(frame)
    assert sorted(taken(later)) == [0, 1]


def test_a_state_is_taken_over_once_all_its_layers_are_here_also_if_the_plan_changes_meanwhile() -> None:
    owner, replica = One("w0", DIVIDED), One("w1", DIVIDED)
    owner.replicator.finalize(1, 0, torch.ones(owner.states[1].final.size))
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
