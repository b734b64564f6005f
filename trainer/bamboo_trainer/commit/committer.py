"""Commits of steps: the root decides them; a new root first collects the newest commits of other workers."""

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.control.protocol import (
    MOST_EVALUATIONS,
    MOST_NUMBER,
    CheckpointBegun,
    Evaluated,
    Evaluations,
    StepCommitted,
    TakeCheckpoint,
)
from bamboo_core.histogram import STEP_SECONDS, Histogram
from bamboo_core.planning.plan import ROOT, Layout, Plan, WorkerId
from bamboo_trainer.commit.commit_log import StepPolicy
from bamboo_trainer.commit.ports import CommitContext, History
from bamboo_trainer.frames import Address, CheckpointMark, Commit, FrameKind

logger = logging.getLogger(__name__)


class Committer:
    """A worker's part in commits: it decides them while it is the root, and records the commits of any root.

    log: the commits known here. step_seconds: seconds between commits that this worker published as the root.
    """

    def __init__(
        self,
        shared: CommitContext,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        history: History,
        policy: StepPolicy,
    ) -> None:
        """Create the committer. new_id: makes the id of an attempt to write a checkpoint."""
        self._clock, self._new_id, self._history, self._policy = clock, new_id, history, policy
        self._shared, self._plan, self._outbox, self._states = shared, shared.plan, shared.outbox, shared.states
        self._coordinator, self.log = shared.coordinator, shared.log
        self.step_seconds = Histogram.of(STEP_SECONDS)
        self.awaited_reports: set[WorkerId] = set()  # workers that may know a commit of an earlier root
        self.cut: CheckpointId | None = None  # the state with which this split of the layers ends
        self._owes_report = False  # to the coordinator, once no reports are awaited
        self._root_since = 0  # the epoch in which this worker became the root
        self._marked: tuple[int, CheckpointId] | None = None  # the newest checkpoint request fulfilled by a commit
        self._committed_at: float | None = None
        self._evaluations: Evaluations = {}  # the newest ones, which the coordinator may lack
        self._wanted: TakeCheckpoint | None = None
        self.pauses = False  # as the root: the job is to end with the last committed state

    # the root

    @property
    def is_root(self) -> bool:
        return self._plan.owner(ROOT) == self._plan.worker

    def decide(self, step: int, layout: Layout) -> Commit | None:
        """As the root, return a step's commit, with a mark if a checkpoint begins with it.

        Return None while a cell's report is missing, the job pauses, or this root awaits other workers' commits; also
        if the step is already committed or comes after the cut (`is_cut`).
        """
        if self.pauses or self.awaited_reports or step in self.log.commits or self.is_cut(step):
            return None
        plan = self._plan.newest if self._may_change_hands(step, layout) else self._plan.current
        commit = self.log.decide(step, self._plan.stages, layout, plan.target.generation, plan.epoch)
        if commit is None:
            return None
        if commit.microbatches:
            commit = self._with_common_state(commit)
        before = self._committed_at
        seconds = 0.0 if before is None else max(0.0, self._clock() - before)
        rate = self._rate(step) if commit.microbatches else None  # an evaluation after the last step has no rate
        commit = msgspec.structs.replace(commit, history=self._history.mark(seconds, rate))
        if not commit.microbatches or self._wanted is None or step + 1 < self._wanted.at:
            return commit
        if commit.epoch != self._plan.current.epoch:
            return commit  # this commit hands over stages, so a writer may not have the state after it
        wanted = self._wanted
        mark = CheckpointMark(number=wanted.number, id=self._new_id(), writers=wanted.writers, hold=wanted.hold)
        return msgspec.structs.replace(commit, checkpoint=mark)

    def is_cut(self, step: int) -> bool:
        """Return whether a step must not run because the layers are split anew before it, at the state `cut`."""
        return self.cut is not None and step >= self.cut.step

    def hold(self, cut: CheckpointId) -> bool:
        """Stop at the state `cut`, where the layers are split anew. Return False if a step after it is committed."""
        if self.log.newest < cut.step:
            self.cut = cut
        return self.cut == cut

    def _may_change_hands(self, step: int, layout: Layout) -> bool:
        """Return whether a waiting plan may take effect with this step's commit.

        An owner that has not reported the step may have to repeat it after a former owner reported it. If the plan took
        effect now, the cell's next owner would wait forever for that step's gradients.
        """
        cells = layout.cells(self._plan.stages)
        waits = self._plan.newest is not self._plan.current
        return waits and all(self.log.has_reported(step, cell, self._plan.owner(cell)) for cell in cells)

    def _with_common_state(self, commit: Commit) -> Commit:
        """Return the commit, marked as skipped if the policy says so, with the common state after its step
        (`CommonState`). If a decision or the evaluation ends training before this step, return a commit without
        training results. All this follows from the reports and stage 0's state, so a new root decides the same.
        """
        if self._policy.leaves_out(commit.loss, commit.norm):
            commit = msgspec.structs.replace(commit, skipped=True)
        root = self._states[ROOT.stage]
        stop = root.ends(commit.evaluation)
        if stop is None:
            return msgspec.structs.replace(commit, common=root.common_after(commit))
        return Commit(
            norm=0.0,
            loss=0.0,
            microbatches=0,
            generation=commit.generation,
            epoch=commit.epoch,
            evaluation=commit.evaluation,
            early_stop=stop,
        )

    def _rate(self, step: int) -> float | None:
        root = self._states.here(ROOT.stage)  # a new root's state may be on its way
        rate = root.learning_rate(step) if root else math.nan
        return rate if math.isfinite(rate) else None

    def take_checkpoint(self, wanted: TakeCheckpoint) -> None:
        """As the root, note a request for a checkpoint of the state `wanted.at` or, if that is too late, a later state.

        The request replaces an earlier one and ends a pause. If the newest mark fulfils it, only report that mark.
        """
        if self._marked and self._marked[0] == wanted.number:
            self._coordinator.tell(CheckpointBegun(number=wanted.number, checkpoint=self._marked[1]))
        elif self.is_root:
            self._wanted, self.pauses = wanted, False

    def record(self, step: int, commit: Commit) -> bool:
        """Record a commit decided here or received. Return False if the log already has one for its step."""
        known = self.log.commits.get(step)
        if known is not None:
            if (known.generation, known.epoch) != (commit.generation, commit.epoch):
                logger.error("two different commits of step %d: %s and %s: a bug in Bamboo", step + 1, known, commit)
            return False
        if self.is_cut(step):
            self.cut = None  # an earlier root has committed it
        if commit.checkpoint:
            mark = commit.checkpoint
            if self._marked is None or step >= self._marked[1].step:
                self._marked = mark.number, CheckpointId(step=step + 1, id=mark.id)
            if self._wanted and self._wanted.number == mark.number:
                self.pauses, self._wanted = self._wanted.pause, None
            if mark.hold:
                self.cut = CheckpointId(step=step + 1, id=mark.id)
        if commit.evaluation or commit.early_stop:
            metrics = {name: _sendable(value) for name, value in commit.evaluation.items()}
            self._keep_evaluations({step: metrics})
        self.log.record(step, commit)
        self.log.forget(self._states.oldest(otherwise=step))
        return True

    def _keep_evaluations(self, new: Evaluations) -> None:
        self._evaluations = dict(sorted((self._evaluations | new).items())[-MOST_EVALUATIONS:])

    def evaluations_received(self, new: Evaluations) -> None:
        """Keep evaluations that another worker sent. If some are new, the root sends all kept ones to the coordinator,
        because the root that made the new ones may have been lost before it sent them.
        """
        is_new = not self._evaluations.keys() >= new.keys()
        self._keep_evaluations(new)
        if is_new and self.is_root:
            self._tell_evaluations()

    def _tell_evaluations(self) -> None:
        ended = self.log.commits.get(max(self._evaluations))
        self._coordinator.tell(Evaluated(states=self._evaluations, early_stop=ended.early_stop if ended else None))

    def publish(self, step: int, commit: Commit) -> None:
        """As the root, send a commit to the other workers and the coordinator, even if an earlier root has sent it."""
        now, before = self._clock(), self._committed_at
        self._committed_at = now
        if before is not None and commit.microbatches:
            self.step_seconds = self.step_seconds.having(now - before)
        workers = self._plan.current.worker_ids() | self._plan.newest.worker_ids()
        self._send(FrameKind.COMMIT, step, commit, sorted(workers - {self._plan.worker}))
        self._tell_coordinator(step, commit, now - before if before is not None else 0.0)

    def meet_root(self, old: Plan | None) -> None:
        """Exchange commits between root and workers under a new plan. old: the plan before, None for the first.

        A root that succeeds another one decides no step until the other workers have sent it their newest commits.
        """
        others = self._plan.others()
        if not self.is_root:
            self.awaited_reports, self._wanted, self.pauses = set(), None, False
            self._introduce()
            return
        if old is None or old.at(ROOT).owner == self._plan.worker:
            self.awaited_reports &= others
            newcomers = others - (old.worker_ids() if old else others)
        else:
            self.awaited_reports, self._root_since, self._committed_at = set(others), self._plan.current.epoch, None
            newcomers = others
        self._tell_newest(sorted(newcomers))
        if newcomers == others:
            self.report()
        self._look_whether_informed()

    def report_received(self, worker: WorkerId, epoch: int) -> None:
        """Record that a worker has sent its newest commits, unless its plan (`epoch`) has an earlier root than this."""
        if epoch >= self._root_since:
            self.awaited_reports.discard(worker)
            self._look_whether_informed()

    def _look_whether_informed(self) -> None:
        if self.is_root and not self.awaited_reports:
            if self._owes_report:
                self.report()
            self._history.informed()

    def relinked(self, peer: WorkerId) -> None:
        """Send commits again that a broken link to a peer may have lost, if that peer or this worker is the root."""
        if self.is_root:
            self._tell_newest([peer])
        elif self._plan.owner(ROOT) == peer:
            self._introduce()

    def report(self) -> None:
        """As the root, send the newest commits and evaluations to the coordinator again. Also end a pause, and drop a
        request for a checkpoint with a pause: a coordinator that still wants it repeats the request.

        A new root waits for the other workers' evaluations first, as the coordinator may end the job with the last
        commit.
        """
        self.pauses, self._owes_report = False, self.is_root and bool(self.awaited_reports)
        if self._wanted and self._wanted.pause:
            self._wanted = None
        if self.is_root and not self.awaited_reports:
            if self._evaluations:
                self._tell_evaluations()
            for step, commit in self.log.latest():
                self._tell_coordinator(step, commit)

    def _introduce(self) -> None:
        """Send the root the commits that the history may lack and the evaluations known here, then the newest commits
        in one frame, so that the root never receives only some of the newest commits.
        """
        root = self._plan.owner(ROOT)
        self._tell_of_the_past([root])
        self._send(FrameKind.HEARD, 0, self.log.latest(), [root])

    def _tell_newest(self, workers: Sequence[WorkerId]) -> None:
        """As the root, send workers the newest commits and, in case this worker is lost, the commits that the history
        may lack and the evaluations that the coordinator may lack.
        """
        if workers:
            self._tell_of_the_past(workers)
        for step, commit in self.log.latest():
            self._send(FrameKind.COMMIT, step, commit, workers)

    def _tell_of_the_past(self, workers: Sequence[WorkerId]) -> None:
        for some in self._history.unwritten():
            self._send(FrameKind.HISTORY, 0, some, workers)
        if self._evaluations:
            self._send(FrameKind.EVALUATIONS, 0, self._evaluations, workers)

    def _send(self, kind: FrameKind, step: int, payload: object, workers: Sequence[WorkerId]) -> None:
        frame = self._outbox.frame(Address(kind, *ROOT, step), payload=payload)
        for worker in workers:
            self._outbox.send(worker, frame)

    def _tell_coordinator(self, step: int, commit: Commit, seconds: float = 0.0) -> None:
        if commit.evaluation or commit.early_stop:
            self._tell_evaluations()
        if not commit.microbatches:
            return
        mark = commit.checkpoint
        self._coordinator.tell(
            StepCommitted(
                step=step,
                generation=self._shared.generation(step),
                loss=_sendable(commit.loss),
                gradient_norm=_sendable(commit.norm),
                microbatches=commit.microbatches,
                seconds=seconds,
                learning_rate=self._rate(step),
                checkpoint=(mark.number, CheckpointId(step=step + 1, id=mark.id)) if mark else None,
                skipped=commit.skipped,
                metrics={name: _sendable(value) for name, value in commit.metrics.items()},
            )
        )


def _sendable(number: float) -> float | None:
    """Return a number, or None if the coordinator refuses it: NaN, or above MOST_NUMBER in magnitude."""
    return number if abs(number) <= MOST_NUMBER else None
