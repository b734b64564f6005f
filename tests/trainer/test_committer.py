"""Commits of steps: which steps the root commits, steps that are not finite, and what a new root waits for."""

import math
from collections import deque

import msgspec
import pytest

from bamboo_core.control.protocol import CheckpointBegun, Evaluated, TakeCheckpoint
from bamboo_core.planning.plan import ROOT, Assignment, Cell, CheckpointId, Layout, Plan
from bamboo_trainer.commit.commit_log import APPLIES_ALL, KEPT_STEPS, CommitLog, StepPolicy
from bamboo_trainer.commit.committer import Committer
from bamboo_trainer.commit.ports import NoHistory
from bamboo_trainer.frames import Commit, FrameKind, Ready
from bamboo_trainer.routing import Outbox, PlanState
from bamboo_trainer.stage.stage_states import StageStates
from recording_transport import RecordingTransport, Told
from replica_kit import planned
from stage_kit import StagesOfTask, small_task

NO, YES = 1.0, math.nan


@pytest.mark.parametrize(
    ("skips", "scales", "loss", "norm", "left_out"),
    [
        (False, False, YES, YES, False),
        (True, False, NO, NO, False),
        (True, False, YES, NO, True),
        (True, False, NO, math.inf, True),
        (False, True, NO, math.inf, True),  # the scale was too large
        (False, True, YES, YES, False),  # the forward overflows in itself
        (True, True, YES, YES, True),
    ],
)
def test_a_step_is_left_out_if_the_policy_says_so(
    skips: bool, scales: bool, loss: float, norm: float, left_out: bool
) -> None:
    assert StepPolicy(skips=skips, scales=scales).leaves_out(loss, norm) is left_out


def test_without_a_policy_every_step_is_applied() -> None:
    assert not APPLIES_ALL.leaves_out(math.nan, math.nan)


LAYOUT = Layout(generation=3, split=((0,), (1,)))


def ready(pipeline: int, stage: int, loss: float = 1.0) -> Ready:
    losses = {pipeline: loss} if stage == 1 else {}
    return Ready(cell=Cell(pipeline, stage), squared_norm=[4.0], losses=losses)


def decided(log: CommitLog) -> Commit | None:
    return log.decide(5, 2, LAYOUT, generation=3, epoch=7)


def test_what_is_recorded_needs_no_reports_any_more() -> None:
    log = CommitLog(5)
    assert log.newest == 4
    for report in [ready(d, s) for d in range(2) for s in range(2)]:
        log.ready(5, report, "a")
    commit = decided(log)
    assert commit is not None
    log.record(5, commit)
    assert (log.newest, log.generation(6), decided(log)) == (5, 3, None)
    log.ready(5, ready(0, 0), "a")
    assert decided(log) is None


def test_the_last_steps_and_what_a_replica_needs_are_kept() -> None:
    log = CommitLog(0)
    for step in range(10):
        log.record(step, Commit(norm=0.0, loss=0.0, microbatches=1, generation=0, epoch=1))
    assert [step for step, _ in log.latest()] == [8, 9]
    log.forget(oldest_needed=4)
    assert sorted(log.commits) == list(range(4, 10))
    log.forget(oldest_needed=100)
    assert sorted(log.commits) == list(range(9 - KEPT_STEPS, 10))


PLAN = planned(3, 1, 1, "a")
FIRST = PLAN.at(ROOT).owner
SECOND, THIRD = (PLAN.at(Cell(0, s)).owner for s in (1, 2))
WISH = TakeCheckpoint(number=4, at=2, writers=((FIRST,), (SECOND,), (THIRD,)))


class One:
    """A worker's committer, with no states of its own, and what it says."""

    def __init__(self, worker: str) -> None:
        self.now, self.said, self.net = 0.0, Told(), RecordingTransport()
        self.plan = PlanState(worker, PLAN)
        self.outbox = Outbox(self.plan, self.net, deque())
        states = StageStates(StagesOfTask(small_task()), False, {})
        self.committer = Committer(
            self.plan,
            self.outbox,
            states,
            self.said,
            lambda: self.now,
            lambda: "attempt",
            NoHistory(),
        )

    def report(self, step: int) -> None:
        """Each cell's owner reports it."""
        for stage, worker in enumerate((FIRST, SECOND, THIRD)):
            losses = dict.fromkeys(range(8), 1.0) if stage == 2 else {}
            self.committer.log.ready(step, Ready(cell=Cell(0, stage), squared_norm=[1.0], losses=losses), worker)

    def decide(self, step: int) -> Commit | None:
        return self.committer.decide(step, PLAN.target)


def new_root() -> Plan:
    """The plan after the loss of the first root: its shadow runs stage 0."""
    shadow = PLAN.at(ROOT).shadow
    assert shadow is not None
    row = (Assignment(owner=shadow), *PLAN.pipelines[0][1:])
    row = tuple(msgspec.structs.replace(a, replicas=tuple(w for w in a.replicas if w != FIRST)) for a in row)
    workers = tuple(p for p in PLAN.workers if p.worker != FIRST)
    return msgspec.structs.replace(PLAN, epoch=PLAN.epoch + 1, pipelines=(row,), workers=workers)


def commit_of(root: One, step: int) -> Commit:
    root.report(step)
    commit = root.decide(step)
    assert commit is not None
    assert root.committer.record(step, commit)
    return commit


def test_a_commit_is_recorded_once() -> None:
    root = One(FIRST)
    commit = commit_of(root, 0)
    assert not root.committer.record(0, commit)
    assert root.decide(0) is None, "what is committed is not decided again"


def test_the_wish_for_a_checkpoint_is_met_by_the_step_that_it_names_and_once() -> None:
    root = One(FIRST)
    root.committer.take_checkpoint(WISH)
    assert commit_of(root, 0).checkpoint is None
    marked = commit_of(root, 1)
    assert marked.checkpoint is not None
    assert (marked.checkpoint.number, marked.checkpoint.id, marked.checkpoint.writers) == (4, "attempt", WISH.writers)
    assert commit_of(root, 2).checkpoint is None
    root.committer.take_checkpoint(WISH)
    (said,) = root.said
    assert isinstance(said, CheckpointBegun)
    assert (said.checkpoint.step, commit_of(root, 3).checkpoint) == (2, None)


def test_who_is_no_root_takes_no_wishes() -> None:
    other = One(SECOND)
    other.committer.take_checkpoint(WISH)
    other.report(5)
    commit = other.decide(5)
    assert commit is not None
    assert commit.checkpoint is None


def test_no_step_begins_after_the_one_at_which_layers_are_split_anew() -> None:
    root = One(FIRST)
    root.committer.take_checkpoint(msgspec.structs.replace(WISH, hold=True))
    for step in range(2):
        commit_of(root, step)
    assert root.committer.is_cut(2)


def test_a_step_that_is_to_begin_anew_is_not_committed_unless_it_was_before() -> None:
    root, earlier, cut = One(FIRST), One(FIRST), CheckpointId(step=1, id="anew4")
    for one in (root, earlier):
        commit_of(one, 0)
        one.report(1)
    assert root.committer.hold(cut)
    assert (root.decide(1), root.committer.is_cut(1)) == (None, True)
    committed = earlier.decide(1)
    assert committed is not None
    assert root.committer.record(1, committed), "an earlier root's commit, which some worker has heard"
    assert not root.committer.is_cut(1)
    assert not root.committer.hold(cut)


PAUSE = msgspec.structs.replace(WISH, pause=True)


def paused() -> One:
    """A root that has committed the step that is the last one before the job is to end."""
    root = One(FIRST)
    root.committer.take_checkpoint(PAUSE)
    for step in range(2):
        commit_of(root, step)
    root.report(2)
    assert (root.decide(2), root.committer.cut) == (None, None), "others may run the step"
    return root


@pytest.mark.parametrize("how", ["another checkpoint", "the same one", "a report"])
def test_a_root_that_pauses_goes_on_when_it_is_asked_for_something_new(how: str) -> None:
    root = paused()
    match how:
        case "another checkpoint":
            root.committer.take_checkpoint(msgspec.structs.replace(PAUSE, number=5, at=3))
        case "the same one":
            root.committer.take_checkpoint(PAUSE)
        case "a report":
            root.committer.report()
    commit = root.decide(2)
    assert (commit is not None) is (how != "the same one")
    if commit is not None:
        assert root.committer.record(2, commit)
        root.report(3)
        assert (root.decide(3) is None) is (how == "another checkpoint"), "it pauses again after that one"


def test_a_root_does_not_pause_if_it_has_reported_since_it_was_asked_to() -> None:
    """The coordinator may have restarted, and the job may go on."""
    root = One(FIRST)
    root.committer.take_checkpoint(PAUSE)
    root.committer.report()
    assert [commit_of(root, step).checkpoint for step in range(3)] == [None] * 3


def test_the_heir_of_a_root_that_pauses_goes_on() -> None:
    plan = new_root()
    heir = One(plan.at(ROOT).owner)
    heir.committer.record(0, commit_of(One(FIRST), 0))
    heir.plan.activate(plan)
    heir.committer.meet_root(PLAN)
    assert not heir.committer.pauses


def test_a_new_root_decides_only_when_all_others_have_reported() -> None:
    plan = new_root()
    root = One(plan.at(ROOT).owner)
    root.plan.activate(plan)
    root.committer.meet_root(PLAN)
    (other,) = root.plan.others()
    assert root.committer.awaited_reports == {other}
    root.report(0)
    assert root.decide(0) is None
    root.committer.report_received(other, PLAN.epoch)
    assert root.decide(0) is None, "said under the plan before, it may not be all"
    root.committer.report_received(other, plan.epoch)
    assert root.decide(0) is not None


def test_others_tell_a_new_root_what_they_know_and_again_when_the_link_broke() -> None:
    plan = new_root()
    other = One(next(w for w in sorted(plan.worker_ids()) if w != plan.at(ROOT).owner))
    other.committer.record(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=0, epoch=PLAN.epoch))
    other.plan.activate(plan)
    other.committer.meet_root(PLAN)
    other.committer.relinked(plan.at(ROOT).owner)
    other.committer.relinked("another worker")
    sent = other.net.take()
    assert [(peer, frame.address.kind) for peer, frame in sent] == [(plan.at(ROOT).owner, FrameKind.HEARD)] * 2
    assert [step for step, _ in sent[0][1].payload] == [0]


def test_a_root_that_joined_late_tells_the_coordinator_the_evaluations_that_others_know() -> None:
    plan, known = new_root(), {2: {"loss": 0.5}}
    other = One(next(w for w in sorted(plan.worker_ids()) if w != plan.at(ROOT).owner))
    other.committer.evaluations_received(known)
    other.plan.activate(plan)
    other.committer.meet_root(PLAN)
    (frame,) = (f for _, f in other.net.take() if f.address.kind is FrameKind.EVALUATIONS)
    assert (frame.payload, other.said) == (known, [])
    root = One(plan.at(ROOT).owner)
    root.plan.activate(plan)
    root.committer.meet_root(PLAN)
    for _ in range(2):
        root.committer.evaluations_received(frame.payload)
    assert root.said == [Evaluated(states=known)]


def test_the_layout_of_a_step_is_the_one_that_the_commit_before_named() -> None:
    root = One(FIRST)
    assert root.committer.layout(0) == PLAN.target
    root.committer.record(0, Commit(norm=1.0, loss=1.0, microbatches=8, generation=9, epoch=PLAN.epoch))
    assert (root.committer.generation(1), root.committer.layout(1)) == (9, None)
