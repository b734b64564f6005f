"""The coordinator's state (`CoordinatorState`), and the turn in which an event changes it (`Turn`).

The state has a frozen record for each subject. A decision replaces a record with a new value by `Turn.put`; the value
comes from `replace`, or from a method of the record if that is not enough.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Command, Emit, Finish, Outcome, RemoveWorker, Send
from bamboo_core.coordinator.progress import Progress
from bamboo_core.coordinator.records.checkpoints import CheckpointState, CopiesInMemory, RestoringState
from bamboo_core.coordinator.records.grids import GridState, Holding, Splits
from bamboo_core.coordinator.records.job import Ending, Inquiry, JobCourse, JobTerms, ModelLayers, Moves, Phase, Plans
from bamboo_core.coordinator.records.workers import (
    Admission,
    GuardState,
    Liveness,
    Membership,
    StragglerState,
    WorkerEnds,
    WorkerRecord,
    Workers,
)
from bamboo_core.coordinator.replacing import Record, replace
from bamboo_core.job.spec import JobSpec
from bamboo_core.planning.plan import Peer, Plan, WorkerId


@dataclass(frozen=True, kw_only=True)  # without slots, for a fast `replace`
class CoordinatorState:
    """Everything the coordinator knows: one record for each subject, and queries over several of them."""

    terms: JobTerms
    course: JobCourse = field(default_factory=JobCourse)
    plans: Plans = field(default_factory=Plans)
    ending: Ending = field(default_factory=Ending)
    workers: Workers = field(default_factory=Workers)
    membership: Membership = field(default_factory=Membership)
    liveness: Liveness = field(default_factory=Liveness)
    worker_ends: WorkerEnds = field(default_factory=WorkerEnds)
    admission: Admission = field(default_factory=Admission)
    layers: ModelLayers = field(default_factory=ModelLayers)
    inquiry: Inquiry = field(default_factory=Inquiry)
    moves: Moves = field(default_factory=Moves)
    progress: Progress = field(default_factory=Progress)
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    restoring: RestoringState = field(default_factory=RestoringState)
    copies: CopiesInMemory = field(default_factory=CopiesInMemory)
    splits: Splits = field(default_factory=Splits)
    grids: GridState = field(default_factory=GridState)
    holding: Holding = field(default_factory=Holding)
    stragglers: StragglerState = field(default_factory=StragglerState)
    guard: GuardState = field(default_factory=GuardState)

    @property
    def spec(self) -> JobSpec:
        """Return the job's spec as edited, with the number of steps that workers counted or an early stop set."""
        return self.terms.spec

    @property
    def phase(self) -> Phase:
        return self.course.phase

    @property
    def plan(self) -> Plan | None:
        """Return the newest plan; None before the first one."""
        return self.plans.newest

    @property
    def step(self) -> int:
        """Return the number of committed steps."""
        return self.progress.step

    @property
    def current_plan(self) -> Plan:
        """Return the newest plan; the job must have one."""
        assert self.plan is not None
        return self.plan

    @property
    def usual_step(self) -> float | None:
        """Return the median seconds of the recent steps; None until one is timed."""
        return self.progress.usual_step

    @property
    def noticed(self) -> tuple[WorkerId, ...]:
        """Return the workers that have joined and have a notice, in the order of the notices."""
        return tuple(w for w in self.membership.leaving if w in self.workers)

    @property
    def staying(self) -> int:
        """Return the number of ready workers without a notice."""
        return sum(1 for worker in self.ready if self.stays(worker))

    def stays(self, worker: WorkerId) -> bool:
        """Return whether the worker has no notice, whether or not it has joined."""
        return worker not in self.membership.leaving

    @property
    def ready(self) -> dict[WorkerId, WorkerRecord]:
        """Return the workers that have loaded the task, in order of joining."""
        return {w: r for w, r in self.workers.items() if r.ready}

    def live(self, plan: Plan) -> dict[WorkerId, Peer]:
        """Return the workers that the plan after `plan` may name, in order of joining: the ready ones, and those of
        `plan` that are not lost.
        """
        named = plan.worker_ids()
        return {w: r.peer for w, r in self.workers.items() if r.ready or w in named}

    def lost(self, plan: Plan) -> frozenset[WorkerId]:
        """Return the plan's workers that have not joined, or were declared lost."""
        return plan.worker_ids() - self.workers.keys()

    def certain_holders(self, plan: Plan) -> list[list[WorkerId]]:
        """Return, by stage, the workers that hold its state unless they are lost: owners, then replicas in step."""
        owners: list[list[WorkerId]] = [[] for _ in plan.stages]
        replicas: list[list[WorkerId]] = [[] for _ in plan.stages]
        for cell in plan.cells():
            if cell.pipeline < plan.target.pipelines:
                owners[cell.stage].append(plan.at(cell).owner)
                replicas[cell.stage] += (w for w in plan.at(cell).replicas if (cell, w) in self.plans.synced)
        return [list(dict.fromkeys((*one, *other))) for one, other in zip(owners, replicas, strict=True)]

    def is_compared(self, version: int, holders: Iterable[Iterable[WorkerId]]) -> bool:
        """Return whether the present holders of each stage have reported equal sums of its state at that version.

        It also returns True for a job that need not be deterministic.
        """
        present = [self.workers.keys() & set(workers) for workers in holders]
        deterministic = self.spec.training.deterministic
        return not deterministic or self.guard.are_equal(self.current_plan.origin, version, present)


_FIELDS = {kind: name for name, kind in get_type_hints(CoordinatorState).items()}


class Turn:
    """One call of `coordinator.step`: the state, which the event's handlers change, and the commands for the shell.

    All changes of the state enter by `put`; nothing else assigns it.
    """

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self.state, self.now = state, now
        self.commands: list[Command] = []

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, in this turn or before."""
        return self.state.phase == "Over"

    def put(self, *records: Record) -> None:
        """Store records in the state, each in the field of its type. A record that is already there changes nothing."""
        changes: dict[str, Any] = {}
        for one in records:
            name = _FIELDS[type(one)]
            if getattr(self.state, name) is not one:
                changes[name] = one
        if changes:
            self.state = replace(self.state, **changes)

    def enter(self, phase: Phase) -> None:
        """Begin a phase now, even if it is the current one."""
        self.put(JobCourse(phase=phase, since=self.now))

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def refuse(self, worker: WorkerId, reason: str, message: str) -> None:
        self.do(Send(worker, protocol.Refused(reason=reason, message=message)))

    def finish(self, outcome: Outcome, reason: str, message: str) -> None:
        """End the job: stop and remove all workers, drop copies of incomplete checkpoints, and emit the outcome."""
        self.enter("Over")
        stop = protocol.Stop(reason=reason, message=message)
        checkpoints = self.state.checkpoints
        useless, writers = checkpoints.uncommitted(), set(checkpoints.dealt.values())
        for worker in self.state.workers:
            if useless and worker in writers:
                self.do(Send(worker, protocol.DropCopies(checkpoints=useless)))
            self.do(Send(worker, stop), RemoveWorker(worker))
        emit = Emit(reason, message, outcome is not Outcome.COMPLETE, final=True)
        self.do(emit, Finish(outcome, reason, message))
