"""The coordinator's memory, and the turn in which an event changes it.

What it knows of a single subject is a record in that subject's room.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar, get_type_hints

from bamboo.control import protocol
from bamboo.control.memory import Memory
from bamboo.coordinator.checkpointing.record import CheckpointState
from bamboo.coordinator.ending.record import WeightsSaving, given_up
from bamboo.coordinator.events import Command, Emit, Finish, Outcome, RemoveWorker, Send
from bamboo.coordinator.grids.record import GridState
from bamboo.coordinator.inquiry import Inquiry
from bamboo.coordinator.moves import Moves
from bamboo.coordinator.progress import Progress
from bamboo.coordinator.splits.record import Filling, Resplit, StragglerState
from bamboo.coordinator.verification.record import VerificationState
from bamboo.coordinator.workers.record import PASSING, Roster, WorkerEnd, WorkerRecord, Workers, roster_of, said_by
from bamboo.job.spec import JobSpec
from bamboo.planning.desired import PlanningView
from bamboo.planning.plan import Cell, Peer, Plan, WorkerId
from bamboo.planning.splits.resplit import Grid

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """The job has fewer steps than the manifest says, as nothing has become better. why: a sentence without its end.
    wanted_steps: as many as the manifest says.
    """

    why: str
    wanted_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """How the job is to end as soon as a state of that many steps or more is kept. since: when that was said."""

    outcome: Outcome
    reason: str
    message: str
    step: int
    since: float


@dataclass(frozen=True, kw_only=True)  # no slots, for `changed`
class CoordinatorState:
    """links: (reporter, peer) -> since when the reporter cannot reach the peer.

    phase: Pending, Recovering (after the coordinator's own restart), Running, Restoring (it goes back to a checkpoint),
    Saving, Over.
    steady: the last reconciliation found nothing to do, and the mere passing of time will not change that.
    resize: the grid that the workers suffice for, and since when, if it is another one than now.
    """

    spec: JobSpec
    manifest: dict[str, Any]
    secret: str
    save_path: str | None
    history: str = ""
    started: float
    heartbeat_timeout: float
    phase: str = "Pending"
    phase_since: float = 0.0
    workers: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    gone: frozenset[WorkerId] = frozenset()
    misfit: tuple[WorkerId, str] | None = None  # the newest worker that was refused for its platform, and why
    misfits_in_a_row: int = 0  # since a worker became ready
    ask_at: float = 0.0  # no workers are asked for before that, because those that came were refused
    links: dict[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    first_signs: dict[WorkerId, float] = field(default_factory=dict)  # of workers just lost: the first sign of it
    patience: float = 0.0  # seconds more to wait for who is not heard, because most were not
    patient_until: float = 0.0
    requested: int = 0  # workers asked for and not joined yet
    silence_reported: bool = False  # those that live do not come back to a restarted coordinator
    profiling: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    sizes: tuple[float, ...] | None = None  # of layers, by which the optimizer's state is divided into shards
    data: tuple[WorkerId, protocol.WorkerReady] | None = None  # who was first to say of what data they are; this
    plan: Plan | None = None
    planned_step: int = 0  # how many were committed when the plan was made
    applied: frozenset[WorkerId] = frozenset()
    synced: frozenset[tuple[Cell, WorkerId]] = frozenset()
    inquiry: Inquiry = field(default_factory=Inquiry)
    moves: Moves = field(default_factory=Moves)
    progress: Progress = field(default_factory=Progress)
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    stopping: Stopping | None = None
    early_stop: EarlyEnd | None = None
    resize: tuple[Grid, float] | None = None
    resplit: Resplit | None = None
    filling: Filling | None = None
    grids: GridState = field(default_factory=GridState)
    began_at: datetime | None = None  # the time of day when the coordinator's clock was at 0; None: nobody has told it
    stragglers: StragglerState = field(default_factory=StragglerState)
    verification: VerificationState = field(default_factory=VerificationState)
    steady: bool = False
    settled: PlanningView | None = field(default=None, compare=False, repr=False)  # for which no plan is better, lately
    failures: tuple[str, ...] = ()  # workers that ended for reasons of their own, and how, since the last commit
    restarts: int = 0  # all such failures
    exit_unknown: frozenset[WorkerId] = frozenset()  # lost, and how they ended is not known (yet)
    ends: dict[WorkerId, WorkerEnd] = field(default_factory=dict)  # of the workers lost since the last commit
    most_memory: tuple[WorkerId, Memory] | None = None  # the largest account so far, and whose
    preemptions: int = 0
    notices: int = 0
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: dict[Cell, WorkerId] = field(default_factory=dict)  # who reported it last
    saving: WeightsSaving | None = None  # in the phase of that name

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self.progress.step

    @property
    def current_plan(self) -> Plan:
        """The newest plan, where there must be one: while the job trains."""
        assert self.plan is not None
        return self.plan

    @property
    def usual_step(self) -> float | None:
        """Seconds: the median of the recent steps."""
        return self.progress.usual_step

    @property
    def roster(self) -> Roster:
        """What is asked of all workers."""
        return roster_of(self.workers)

    @property
    def forward_share(self) -> float | None:
        """Of what microbatches take there and back, as workers say; None if none has said."""
        return said_by(self.workers).forward_share

    @property
    def ready(self) -> dict[WorkerId, WorkerRecord]:
        """The workers that plans may count on."""
        return {w: self.workers[w] for w in self.roster.ready}

    def live(self, plan: Plan) -> dict[WorkerId, Peer]:
        """The workers that the plan after that one names, in order of joining."""
        return self.roster.live(plan)

    def certain_holders(self, plan: Plan) -> list[list[WorkerId]]:
        """Of each stage of that plan, or of each shard, all who hold it for certain, owners first."""
        of_state: list[list[Cell]] = [[] for _ in plan.state_layers]
        for cell in plan.cells():
            if cell.pipeline < plan.target.pipelines:
                of_state[plan.state_of(cell)].append(cell)

        def holders(cells: list[Cell]) -> list[WorkerId]:
            owners = [plan.at(c).owner for c in cells]
            replicas = [w for c in cells for w in plan.at(c).replicas if (c, w) in self.synced]
            return list(dict.fromkeys((*owners, *replicas)))

        return [holders(cells) for cells in of_state]


def changed(value: T, changes: Mapping[str, Any]) -> T:
    """As dataclasses.replace(), but without a look at each field: a state has fifty, and every message changes one.

    value: of a dataclass without slots, and without __post_init__. Raises TypeError for a field that it has not.
    """
    if unknown := changes.keys() - value.__dict__.keys():
        raise TypeError(f"{type(value).__name__} has no {', '.join(sorted(unknown))}")
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__)
    new.__dict__.update(changes)
    return new


Record = Inquiry | Moves | Progress
_FIELDS = {kind: name for name, kind in get_type_hints(CoordinatorState).items()}


class Turn:
    """Collects the commands of one step; `state` is replaced, never written."""

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self.state, self.now = state, now
        self.commands: list[Command] = []

    def put(self, *records: Record) -> None:
        """Each record in its place."""
        changes: dict[str, Any] = {_FIELDS[type(one)]: one for one in records}
        self.state = replace(self.state, **changes)

    def set(self, **changes: Any) -> None:
        self.state = changed(self.state, changes)

    def enter(self, phase: str) -> None:
        self.set(phase=phase, phase_since=self.now)

    def worker(self, worker: WorkerId, **changes: Any) -> None:
        if worker in self.state.workers:
            new = changed(self.state.workers[worker], changes)
            before = self.state.workers
            roster = roster_of(before) if changes.keys() <= PASSING else None
            workers = Workers.of(before, roster, None if "times" in changes else said_by(before))
            workers[worker] = new
            self.set(workers=workers)

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def refuse(self, worker: WorkerId, reason: str, message: str) -> None:
        self.do(Send(worker, protocol.Refused(reason=reason, message=message)))

    def finish(self, outcome: Outcome, reason: str, message: str) -> None:
        self.enter("Over")
        stop = protocol.Stop(reason=reason, message=message, discard=given_up(self.state.saving))
        for worker in self.state.workers:
            self.do(Send(worker, stop), RemoveWorker(worker))
        emit = Emit(reason, message, outcome is not Outcome.COMPLETE, final=True)
        self.do(emit, Finish(outcome, reason, message))
