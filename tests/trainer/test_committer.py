"""Commits of steps: which steps the root commits or skips, and the reports that a new root waits for."""

import math

import msgspec
import pytest

from bamboo_core.control.protocol import CheckpointBegun, Evaluated, TakeCheckpoint
from bamboo_core.planning.plan import ROOT, Assignment, Cell, CheckpointId, Plan
from bamboo_trainer.commit.commit_log import APPLIES_ALL, KEPT_STEPS, CommitLog, StepPolicy
from bamboo_trainer.frames import Commit, FrameKind, Ready
from engine_kit import THREE, OneEngine

NO, YES = 1.0, math.nan


@pytest.mark.parametrize(
    ("policy", "loss", "norm", "left_out"),
    [
        (APPLIES_ALL, YES, YES, False),
        (StepPolicy(skips=True), NO, NO, False),
        (StepPolicy(skips=True), YES, NO, True),
        (StepPolicy(skips=True), NO, math.inf, True),
        (StepPolicy(scales=True), NO, math.inf, True),  # the scale was too large
        (StepPolicy(scales=True), YES, YES, False),  # the forward overflows in itself
        (StepPolicy(skips=True, scales=True), YES, YES, True),
    ],
)
def test_a_step_is_left_out_if_the_policy_says_so(policy: StepPolicy, loss: float, norm: float, left_out: bool) -> None:
    assert policy.leaves_out(loss, norm) is left_out


def test_the_last_steps_and_what_a_replica_needs_are_kept() -> None:
    log = CommitLog(0)
    for step in range(10):
        log.record(step, Commit(norm=0.0, loss=0.0, microbatches=1, generation=0, epoch=1))
    assert [step for step, _ in log.latest()] == [8, 9]
    log.forget(oldest_needed=4)
    assert sorted(log.commits) == list(range(4, 10))
    log.forget(oldest_needed=100)
    assert sorted(log.commits) == list(range(9 - KEPT_STEPS, 10))


OWNERS = tuple(THREE.at(Cell(0, stage)).owner for stage in range(3))
REQUEST = TakeCheckpoint(number=4, at=2, writers=tuple((owner,) for owner in OWNERS))


def decided(one: OneEngine, step: int) -> Commit | None:
    """Report a step for all cells' owners. Return the commit that the worker decides on, or None."""
    for stage, worker in enumerate(OWNERS):
        losses = dict.fromkeys(range(8), 1.0) if stage == 2 else {}
        report = Ready(cell=Cell(0, stage), squared_norm=[1.0], losses=losses)
        one.inside.committer.log.ready(step, report, worker)
    return one.inside.committer.decide(step, THREE.target)


def commit_of(root: OneEngine, step: int) -> Commit:
    commit = decided(root, step)
    assert commit is not None
    assert root.inside.committer.record(step, commit)
    assert not root.inside.committer.record(step, commit), "it is known"
    return commit


def new_root() -> Plan:
    """Return the plan after the loss of the first root: its shadow runs stage 0."""
    shadow = THREE.at(ROOT).shadow
    assert shadow is not None
    row = (Assignment(owner=shadow), *THREE.pipelines[0][1:])
    row = tuple(msgspec.structs.replace(a, replicas=tuple(w for w in a.replicas if w != OWNERS[0])) for a in row)
    workers = tuple(p for p in THREE.workers if p.worker != OWNERS[0])
    return msgspec.structs.replace(THREE, epoch=THREE.epoch + 1, pipelines=(row,), workers=workers)


def test_a_checkpoint_is_marked_in_the_step_that_the_request_names_by_the_root_and_once() -> None:
    root, other = OneEngine(OWNERS[0]), OneEngine(new_root().at(ROOT).owner)
    for one in (root, other):
        one.inside.committer.take_checkpoint(REQUEST)
    assert commit_of(root, 0).checkpoint is None
    marked = commit_of(root, 1)
    assert marked.checkpoint is not None
    assert (marked.checkpoint.number, marked.checkpoint.writers) == (4, REQUEST.writers)
    assert commit_of(root, 2).checkpoint is None
    root.inside.committer.take_checkpoint(REQUEST)
    (begun,) = [message for message in root.said if isinstance(message, CheckpointBegun)]
    assert (begun.checkpoint.step, commit_of(root, 3).checkpoint) == (2, None)
    assert commit_of(other, 5).checkpoint is None


def test_a_step_that_is_to_begin_anew_is_not_committed_unless_it_was_before() -> None:
    root, earlier, cut = OneEngine(OWNERS[0]), OneEngine(OWNERS[0]), CheckpointId(step=1, id="anew4")
    for one in (root, earlier):
        commit_of(one, 0)
    committer = root.inside.committer
    assert committer.hold(cut)
    assert (decided(root, 1), committer.is_cut(1)) == (None, True)
    assert committer.record(1, commit_of(earlier, 1)), "an earlier root's commit, which some worker has heard"
    assert not committer.is_cut(1)
    assert not committer.hold(cut)
    committer.take_checkpoint(msgspec.structs.replace(REQUEST, hold=True))
    assert commit_of(root, 2).checkpoint is not None
    assert committer.is_cut(3), "layers are split anew after it"


PAUSE = msgspec.structs.replace(REQUEST, pause=True)


@pytest.mark.parametrize("how", ["another checkpoint", "the same one", "a report", "a report before the pause"])
def test_a_root_that_pauses_goes_on_when_it_is_asked_for_something_new(how: str) -> None:
    """A paused root goes on at a request for another checkpoint or (from a restarted coordinator) for a report."""
    root = OneEngine(OWNERS[0])
    committer = root.inside.committer
    committer.take_checkpoint(PAUSE)
    if how == "a report before the pause":
        committer.report()
        assert [commit_of(root, step).checkpoint for step in range(3)] == [None] * 3
        return
    for step in range(2):
        commit_of(root, step)
    assert (decided(root, 2), committer.cut) == (None, None), "others may run the step"
    match how:
        case "another checkpoint":
            committer.take_checkpoint(msgspec.structs.replace(PAUSE, number=5, at=3))
        case "the same one":
            committer.take_checkpoint(PAUSE)
        case "a report":
            committer.report()
    commit = decided(root, 2)
    assert (commit is not None) is (how != "the same one")
    if commit is not None:
        assert committer.record(2, commit)
        assert (decided(root, 3) is None) is (how == "another checkpoint"), "it pauses again after that one"


def test_a_new_root_decides_only_when_all_others_have_reported() -> None:
    plan = new_root()
    root = OneEngine(plan.at(ROOT).owner)
    root.engine.obey(plan)
    committer = root.inside.committer
    (other,) = root.inside.plan.others()
    assert committer.awaited_reports == {other}
    for epoch in (None, THREE.epoch):
        if epoch is not None:
            committer.report_received(other, epoch)
        assert decided(root, 0) is None, "what it sent under the plan before may not be all"
    committer.report_received(other, plan.epoch)
    assert decided(root, 0) is not None


def test_others_tell_a_new_root_commits_and_evaluations_and_again_when_the_link_broke() -> None:
    """Other workers send the commits and evaluations that they know to a new root, which may have joined late."""
    plan, known = new_root(), {2: {"loss": 0.5}}
    one, root = (OneEngine(w) for w in (min(plan.worker_ids() - {plan.at(ROOT).owner}), plan.at(ROOT).owner))
    committer = one.inside.committer
    committer.record(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=THREE.epoch))
    committer.evaluations_received(known)
    one.engine.obey(plan)
    for peer in (plan.at(ROOT).owner, "another worker"):
        committer.relinked(peer)
    frames = [(peer, frame) for peer, frame in one.net.take() if frame.address.kind in TOLD]
    assert [(peer, frame.address.kind) for peer, frame in frames] == [(plan.at(ROOT).owner, kind) for kind in TOLD] * 2
    assert ([step for step, _ in frames[1][1].payload], frames[0][1].payload) == ([0], known)
    root.engine.obey(plan)
    for _ in range(2):
        root.inside.committer.evaluations_received(known)
    evaluated = [[m for m in worker.said if isinstance(m, Evaluated)] for worker in (one, root)]
    assert evaluated == [[], [Evaluated(states=known)]]


TOLD = (FrameKind.EVALUATIONS, FrameKind.HEARD)
