"""The coordinator's records of the job: its terms, phase, plans, moves of cells, layers, inquiry and end."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Takeover
from bamboo_core.coordinator.progress import MOST_SECONDS
from bamboo_core.coordinator.replacing import Record, replace
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.desired import PlanningView
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.planning.profile import LayerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """The early end of a job, by its evaluations or a decision of the task.

    why: the reason, a clause. wanted_steps: the number of steps that the manifest asks for.
    """

    why: str
    wanted_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms(Record):
    """The terms of a job: its spec, manifest and settings. Only spec and early_stop change: by an edit, an early stop
    or its undoing, or when a worker has counted the steps.

    secret: the secret that the job's workers share. history: URL of the job's history, which workers write; "" if none
    is kept. last_state: URL for the checkpoint of the last state of a job that keeps no other checkpoints; "" if that
    is not kept. started: when the coordinator was made. heartbeat_timeout: seconds. early_stop: set if the spec's
    number of steps is that of an early stop.
    """

    spec: JobSpec
    manifest: dict[str, Any]
    secret: str
    history: str = ""
    last_state: str = ""
    started: float
    heartbeat_timeout: float
    early_stop: EarlyEnd | None = None

    def welcome(self) -> protocol.Welcome:
        """Return the message to a worker that has joined or reconnected."""
        return protocol.Welcome(
            manifest=self.manifest, secret=self.secret, history=self.history, last_state=self.last_state
        )

    def with_steps(self, steps: int) -> "JobTerms":
        """Set the number of steps, which a worker has counted from its data."""
        return replace(self, spec=self._of_steps(steps))

    def stopped_early(self, last: int, why: str) -> "JobTerms":
        """Shorten the job to `last` steps. why: the reason, a clause."""
        wanted = self.early_stop.wanted_steps if self.early_stop else self.spec.training.steps
        return replace(self, spec=self._of_steps(last), early_stop=EarlyEnd(why=why, wanted_steps=wanted))

    def back_at(self, step: int) -> "JobTerms":
        """Undo an early stop if workers begin anew with the state after `step` steps, and that is before the stop."""
        stop = self.early_stop
        if stop is None or step >= self.spec.training.steps:
            return self
        return replace(self, spec=self._of_steps(stop.wanted_steps), early_stop=None)

    def _of_steps(self, steps: int) -> JobSpec:
        return replace(self.spec, training=replace(self.spec.training, steps=steps))


Phase = Literal["Pending", "Recovering", "Running", "Restoring", "Over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCourse(Record):
    """The phase of the job. since: when the phase began, in seconds.

    Recovering: after the coordinator's own restart, until the workers are back or overdue. Restoring: the job goes back
    to a checkpoint or to step 0.
    """

    phase: Phase = "Pending"
    since: float = 0.0


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class Plans(Record):
    """The job's newest plan, and how far workers follow it.

    newest: None before the first plan. since_step: number of steps committed when this coordinator last issued a plan.
    applied: workers that have applied `newest`. synced: replicas in step. in_force: the plan before `newest`, if
    `newest` only ends its portions (microbatches of a cell, dealt to several workers) and no worker has applied it.

    steady: the last `replan` found nothing to do, and time alone will not change that. settled: the newest view for
    which no plan was better.
    """

    newest: Plan | None = None
    since_step: int = 0
    applied: frozenset[WorkerId] = frozenset()
    synced: frozenset[tuple[Cell, WorkerId]] = frozenset()
    in_force: Plan | None = None
    steady: bool = False
    settled: PlanningView | None = field(default=None, compare=False, repr=False)

    def moved_by(self, plan: Plan) -> list[tuple[Cell, WorkerId]]:
        """Return the cells of `newest` that a new plan of its origin gives to other owners, with the present owners."""
        return [(cell, owner) for cell, owner in self._owners_before(plan) if owner != plan.at(cell).owner]

    def issued(self, plan: Plan, step: int) -> "Plans":
        """Make a plan the newest one. If it has the same origin, replicas in step remain so where the cell keeps its
        owner, and a former owner that becomes a replica is in step.
        """
        synced: set[tuple[Cell, WorkerId]] = set()
        for cell, owner in self._owners_before(plan):
            now = plan.at(cell)
            if owner == now.owner:
                synced |= {(cell, w) for w in now.replicas if (cell, w) in self.synced}
            else:
                synced |= {(cell, w) for w in now.replicas if w == owner}
        in_force = self.newest if plan.boundary and plan.reason == "Settled" else None
        return replace(
            self, newest=plan, since_step=step, applied=frozenset(), synced=frozenset(synced), in_force=in_force
        )

    def settles(self, step: int) -> bool:
        """Return whether the newest plan only ends portions (`in_force`) and waits for the end of the step."""
        return self.in_force is not None and step <= self.since_step

    def of_step(self, step: int) -> Plan | None:
        """Return the base of the next plan: the newest one or, if it `settles`, `in_force` with the newest epoch."""
        if self.newest is None or self.in_force is None or not self.settles(step):
            return self.newest
        return msgspec.structs.replace(self.in_force, epoch=self.newest.epoch)

    def _owners_before(self, plan: Plan) -> list[tuple[Cell, WorkerId]]:
        """Return the cells that `plan` and `newest` share, with the owners in `newest`; [] without a common origin."""
        old = self.newest
        if old is None or old.origin != plan.origin:
            return []
        return [(cell, old.at(cell).owner) for cell in plan.cells() if cell.pipeline < len(old.pipelines)]

    def brought(self, plan: Plan) -> "Plans":
        """Adopt a plan that a worker brings to a restarted coordinator, if it is newer than the newest one."""
        old = self.newest
        if old is not None and plan.epoch <= old.epoch:
            return self
        kept = {
            (cell, w) for cell, w in self.synced if old and plan.has(cell) and plan.at(cell).owner == old.at(cell).owner
        }
        return replace(self, newest=plan, synced=frozenset(kept), applied=frozenset(), in_force=None)

    def kept_for(self, view: PlanningView, *, steady: bool) -> "Plans":
        """Record that no plan is better for this view. steady: time alone will not change that."""
        if not (steady or self.steady) and view == self.settled:
            return self
        return replace(self, settled=view, steady=steady)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One plan's moves of cells to new owners, without cells whose new owner has reported that it caught up.

    epoch: the plan's epoch. lost_at: when the coordinator first saw a sign of a loss, else `decided_at`; both in
    seconds of its clock. step: number of steps committed then. notice: no previous owner was lost. announced: a
    previous owner was lost or had a notice; other moves are not shown to users. victims: the cells and previous owners.
    """

    epoch: int
    lost_at: float
    decided_at: float
    step: int
    notice: bool
    announced: bool
    victims: tuple[tuple[Cell, WorkerId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves(Record):
    """Moves of cells in progress (recoveries) and finished takeovers."""

    recoveries: tuple[Recovery, ...] = ()
    takeovers: tuple[Takeover, ...] = ()

    def without(self, cells: Set[Cell], epoch: int) -> "Moves":
        """Drop the moves of these cells by plans up to this epoch: they are over, or will not be reported."""
        left = []
        for recovery in self.recoveries:
            over = cells if recovery.epoch <= epoch else frozenset[Cell]()
            victims = tuple((cell, victim) for cell, victim in recovery.victims if cell not in over)
            if victims:
                left.append(replace(recovery, victims=victims))
        return replace(self, recoveries=tuple(left))

    def taken_over(self, worker: WorkerId, message: protocol.TakenOver) -> "Moves":
        """Record that a cell's new owner has caught up; earlier intended owners will not report.

        If the cell moved on before an announced takeover was over, this report ends that takeover.
        """
        cell = message.cell
        moves = [r for r in self.recoveries if r.epoch <= message.epoch and cell in dict(r.victims)]
        left = self.without({cell}, message.epoch)
        recovery = next((r for r in reversed(moves) if r.announced), None)
        if recovery is None:
            return left
        taken = Takeover(
            epoch=moves[-1].epoch,
            victim=dict(recovery.victims)[cell],
            worker=worker,
            pipeline=cell.pipeline,
            stage=cell.stage,
            step=message.step + 1,
            notice=recovery.notice,
            decide_ms=(recovery.decided_at - recovery.lost_at) * 1e3,
            reform_ms=_milliseconds(message.reform_ms),
            recompute_ms=_milliseconds(message.recompute_ms),
            forwards=message.forwards,
            backwards=message.backwards,
        )
        return replace(left, takeovers=(*self.takeovers, taken))


def _milliseconds(value: float) -> float:
    return min(max(0.0, value), 1e3 * MOST_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers(Record):
    """The costs and sizes of the model's layers, as a worker reports them (Profile).

    asked: the worker that was asked; None: none. costs: of each layer (operations, or `Task.costs`); None until known.
    sizes: the layers' bytes; empty if unknown. memory: bytes of that worker's smallest device; None if unknown.
    """

    asked: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    sizes: tuple[LayerBytes, ...] = ()
    memory: int | None = None

    def not_asked_of(self, worker: WorkerId) -> "ModelLayers":
        """Forget the request to this worker, which is gone or has reconnected, so that a worker is asked again."""
        return replace(self, asked=None if self.asked == worker else self.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry(Record):
    """The question to all workers which states they hold (ReportRequest).

    began_at: when all workers were first asked; None if no question is open. asked_at: when they were last asked.
    reports: the answers since then.
    """

    began_at: float | None = None
    asked_at: float = 0.0
    reports: Mapping[WorkerId, protocol.Report] = field(default_factory=dict)

    def over(self) -> "Inquiry":
        """Close the question, and forget its answers."""
        return replace(self, began_at=None, reports={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """A request to end the job, once a checkpoint after `step` or more steps is complete, given up or too slow.

    since: when it was requested, in seconds. unheard: workers have to reconnect to a restarted coordinator first.
    """

    reason: str
    message: str
    step: int
    since: float
    unheard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Record):
    """The end of the job.

    stopping: the open request to end the job. finished: the cells that have run all steps, each with the digest of its
    last state. finishers: for each cell, the worker that last reported this.
    """

    stopping: Stopping | None = None
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: Mapping[Cell, WorkerId] = field(default_factory=dict)
