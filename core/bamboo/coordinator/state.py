"""The coordinator's memory, and the turn in which an event changes it."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final, TypeVar

from bamboo.checkpoint.manifest import CheckpointPart
from bamboo.control import protocol
from bamboo.control.memory import Memory, SentTraffic
from bamboo.control.platform import Platform
from bamboo.coordinator.checkpoint_counts import CheckpointCounts
from bamboo.coordinator.ending.record import WeightsSaving, given_up
from bamboo.coordinator.events import Command, Emit, Finish, Outcome, RemoveWorker, Send, Takeover
from bamboo.coordinator.verification.record import VerificationState
from bamboo.job.spec import JobSpec
from bamboo.planning.backoff import Backoff
from bamboo.planning.plan import Cell, CheckpointId, Peer, Plan, WorkerId
from bamboo.planning.splits.resplit import Grid
from bamboo.planning.splits.speeds import Layers, WorkEstimate
from bamboo.planning.splits.stage_times import StageTimes
from bamboo.planning.splits.tried_splits import Trial, TriedSplit
from bamboo.planning.splits.uneven_split import Ranges
from bamboo.planning.transitions import PlanningView

KEPT_LOSSES = 2000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)  # no slots, for `changed`
class WorkerRecord:
    """A worker that joined and is not known to be lost."""

    peer: Peer
    seen: float
    platform: Platform = field(default_factory=Platform)
    doing: str = ""  # in its own words
    busy: float = 0.0  # seconds for which it had been inside one instruction when it was heard last
    memory: Memory | None = None  # as it said last
    times: tuple[StageTimes, ...] = ()  # as it said last
    headroom: float | None = None  # how many times as much memory as now there is for it, as it said with the times
    traffic: SentTraffic | None = None  # as it said last
    ready: bool = False  # its task is loaded
    epoch: int = 0  # of the newest plan that it knew when it joined
    origin: int = 0  # of the newest plan that it obeys
    cut_since: float | None = None  # the channel is closed since then
    notice_until: float | None = None
    notice_seconds: float = 0.0
    notice_final: bool = False
    replaced: bool = False  # the notice is ours: it is slow, and goes if another one takes its place
    free_since_step: int | None = None  # it has a notice and no part any more
    released: bool = False  # it was told to leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A plan that moves cells, until every new owner has reported.

    victims: the cells, and who ran them. step: how many were committed. announced: somebody was lost, or has a notice;
    else it is of no interest that the cells move.
    """

    epoch: int
    lost_at: float
    decided_at: float
    step: int
    notice: bool
    announced: bool
    victims: tuple[tuple[Cell, WorkerId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended, or was missed. disrupted: it was taken away, for no reason of its own."""

    how: str
    disrupted: bool


def without_moves(recoveries: tuple[Recovery, ...], cells: Set[Cell], epoch: int) -> tuple[Recovery, ...]:
    """Those that are left when these cells' moves up to that epoch are over."""
    left = []
    for recovery in recoveries:
        over = cells if recovery.epoch <= epoch else frozenset[Cell]()
        victims = tuple((cell, victim) for cell, victim in recovery.victims if cell not in over)
        if victims:
            left.append(replace(recovery, victims=victims))
    return tuple(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What the coordinator knows of the job's checkpoints (`checkpoints`).

    In progress: number, of the wish; at, its step or a later one; writers, of each stage, empty if none is in
    progress; dealt: which of them writes which layer; writing: the checkpoint, once a commit has carried the wish;
    parts: by layer. early, failed: parts of checkpoints whose commit is not heard of yet, and why one fails. stall:
    seconds for which training waited, so far.
    asked, asked_at: who has to act now, and when that was said last. since: when the wish, then the writing, began.
    kept: those committed and not known to be bad, newest first. kept_at: when the newest of them was. bad: those that
    turned out to be damaged.
    looked: whether it is known with which one (found) the job begins. reason, message: why it has to go back to one.
    counts: what became of all of them. first: the step with which the job began.
    final: the one in progress is of the last state, and those who have finished were asked for it one by one.
    final_failures: of checkpoints of the last state.
    copies: of the newest ones, who keeps which layers in host memory.
    tidying: the newest one and who wrote it, while that worker removes others. endangered: the workers with notice for
    whose sake one was taken.
    """

    number: int = 0
    at: int = 0
    writers: tuple[tuple[WorkerId, ...], ...] = ()
    dealt: Mapping[int, WorkerId] = field(default_factory=dict)
    writing: CheckpointId | None = None
    parts: Mapping[int, CheckpointPart] = field(default_factory=dict)
    early: Mapping[CheckpointId, Mapping[int, CheckpointPart]] = field(default_factory=dict)
    failed: Mapping[CheckpointId, str] = field(default_factory=dict)
    asked: WorkerId | None = None
    asked_at: float = 0.0
    since: float = 0.0
    stall: float = 0.0
    back_since: float | None = None  # the job has to go back to one since then, and has not committed a step again
    pausing: bool = False  # before the store is asked again
    retry: bool = False  # the next one is due at once
    last_step: int = 0  # of the newest one, or of the newest attempt
    kept: tuple[CheckpointId, ...] = ()
    kept_at: float | None = None
    bytes: int = 0  # of the newest one
    seconds: float = 0.0  # that it took
    bad: tuple[CheckpointId, ...] = ()
    question: int = 0  # the number of the newest one to a worker that looks
    looked: bool = False
    found: CheckpointId | None = None
    problem: str = ""  # why the store does not tell
    reason: str = ""
    message: str = ""
    counts: CheckpointCounts = field(default_factory=CheckpointCounts)
    first: int = 0
    final: bool = False
    final_failures: int = 0
    copies: Mapping[CheckpointId, Mapping[WorkerId, frozenset[int]]] = field(default_factory=dict)
    tidying: tuple[CheckpointId, WorkerId] | None = None
    endangered: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierProgress:
    """How far the job had come before this coordinator, as far as its shell knows. step_seconds: the usual duration."""

    step: int = 0
    step_seconds: float | None = None


BEGINNING: Final = EarlierProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resplit:
    """Layers that are to be split anew (`resplit`).

    number: of the wish for a cut, at that step or a later one. asked, asked_at: the root that was told last. cut: once
    a commit has carried the wish. since: when the wish, then the cut, came. held: by worker, the layers of the cut's
    state that it says it has copies of. stages: for the sake of speed; the grid stays, and everybody its place.
    """

    number: int
    at: int
    since: float
    asked: WorkerId | None = None
    asked_at: float = 0.0
    cut: CheckpointId | None = None
    held: Mapping[WorkerId, frozenset[int]] = field(default_factory=dict)
    stages: Ranges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that takes longer than others would for its layers.

    since, step: when that was seen first, and how many steps were committed then. cell: which it runs. seconds: that it
    takes for a microbatch; usual: that others would. compared: with others, not with the counted costs of its layers.
    found: for long enough, and told.
    """

    since: float
    step: int
    cell: Cell
    seconds: float
    usual: float
    compared: bool
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerState:
    """What is known of workers' speeds, and what was done (`stragglers`).

    slow: also those that are not found yet. estimate: the newest that covers all layers. uneven: since when, and since
    which step, another split of them is expected to be faster; better: that split, once it is for long enough.
    trial: the newest split for the sake of speed, until it is known whether it pays; unpaid: it did not, and the one
    before it is to be taken again. tried: what steps took with the splits that were measured.
    replaced: what workers took that were replaced, by their layers. backoff, acted_step: of replacements and splits for
    the sake of speed. replacements: of these. asked_at: since when one worker more than the job has is asked for, to
    take the place of a slow one. pause: of the last split, in seconds.
    """

    slow: Mapping[WorkerId, Straggler] = field(default_factory=dict)
    estimate: WorkEstimate | None = None
    uneven: tuple[float, int] | None = None
    better: Trial | None = None
    trial: Trial | None = None
    unpaid: bool = False
    tried: tuple[TriedSplit, ...] = ()
    replaced: Mapping[tuple[WorkerId, Layers], float] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    acted_step: int = 0
    replacements: int = 0
    asked_at: float | None = None
    looked_at: float = 0.0
    pause: float | None = None


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
    links: dict[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    first_signs: dict[WorkerId, float] = field(default_factory=dict)  # of workers just lost: the first sign of it
    patience: float = 0.0  # seconds more to wait for who is not heard, because most were not
    patient_until: float = 0.0
    requested: int = 0  # workers asked for and not joined yet
    silence_reported: bool = False  # those that live do not come back to a restarted coordinator
    profiling: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    sizes: tuple[float, ...] | None = None  # of layers, by which the optimizer's state is divided into shards
    data: tuple[WorkerId, int, int] | None = None  # who was first to say how many samples and steps there are; these
    plan: Plan | None = None
    planned_step: int = 0  # how many were committed when the plan was made
    applied: frozenset[WorkerId] = frozenset()
    synced: frozenset[tuple[Cell, WorkerId]] = frozenset()
    asked_at: float | None = None  # when everyone was asked what it holds, because a stage seems to be lost
    round_at: float = 0.0  # when everyone was asked last
    reports: dict[WorkerId, protocol.Report] = field(default_factory=dict)  # the answers to that
    recoveries: tuple[Recovery, ...] = ()
    checkpoints: CheckpointState = field(default_factory=CheckpointState)
    stopping: Stopping | None = None
    early_stop: EarlyEnd | None = None
    resize: tuple[Grid, float] | None = None
    resplit: Resplit | None = None
    stragglers: StragglerState = field(default_factory=StragglerState)
    verification: VerificationState = field(default_factory=VerificationState)
    steady: bool = False
    settled: PlanningView | None = field(default=None, compare=False, repr=False)  # for which no plan is better, lately
    step: int = 0  # committed steps
    furthest: int = 0  # the most that ever were, perhaps before the job went back to a checkpoint
    counting: bool = False  # is it known from which step on this coordinator counts?
    trained: int = 0  # steps committed for the first time since then
    earlier: EarlierProgress = BEGINNING
    generation: int = -1  # the newest layout that a step was committed with
    first_loss: float | None = None
    losses: dict[int, float] = field(default_factory=dict)  # of the newest steps
    evaluations: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)  # the newest, by state
    skips: tuple[int, ...] = ()  # the newest steps that were skipped, in order
    skipped_steps: int = 0  # since the coordinator counts; a step that is repeated counts once
    gradient_norm: float | None = None  # of the newest step
    learning_rate: float | None = None  # of the newest step
    metrics: dict[str, float | None] = field(default_factory=dict)  # of the newest step
    lost_microbatches: int = 0  # since the coordinator counts; a step that is repeated counts once
    lost_by_step: dict[int, int] = field(default_factory=dict)  # the microbatches of steps that lack some
    step_seconds: tuple[float, ...] = ()
    last_progress: float = 0.0
    failures: tuple[str, ...] = ()  # workers that ended for reasons of their own, and how, since the last commit
    restarts: int = 0  # all such failures
    exit_unknown: frozenset[WorkerId] = frozenset()  # lost, and how they ended is not known (yet)
    ends: dict[WorkerId, WorkerEnd] = field(default_factory=dict)  # of the workers lost since the last commit
    most_memory: tuple[WorkerId, Memory] | None = None  # the largest account so far, and whose
    preemptions: int = 0
    notices: int = 0
    takeovers: tuple[Takeover, ...] = ()
    finished: tuple[tuple[Cell, str], ...] = ()
    finishers: dict[Cell, WorkerId] = field(default_factory=dict)  # who reported it last
    saving: WeightsSaving | None = None  # in the phase of that name

    @property
    def current_plan(self) -> Plan:
        """The newest plan, where there must be one: while the job trains."""
        assert self.plan is not None
        return self.plan

    @property
    def usual_step(self) -> float | None:
        """Seconds: the median of the recent steps."""
        return median(self.step_seconds[-20:]) if self.step_seconds else None

    @property
    def ready(self) -> dict[WorkerId, WorkerRecord]:
        """The workers that plans may count on."""
        return {w: r for w, r in self.workers.items() if r.ready}

    def live(self, plan: Plan) -> dict[WorkerId, Peer]:
        """The workers that the plan after that one names, in order of joining."""
        return {w: r.peer for w, r in self.workers.items() if r.ready or w in plan.worker_ids()}

    def certain_holders(self, plan: Plan) -> list[list[WorkerId]]:
        """Of each stage of that plan, or of each shard, all who hold it for certain, owners first."""

        def holders(number: int) -> list[WorkerId]:
            cells = [c for c in plan.cells() if plan.state_of(c) == number and c.pipeline < plan.target.pipelines]
            owners = [plan.at(c).owner for c in cells]
            replicas = [w for c in cells for w in plan.at(c).replicas if (c, w) in self.synced]
            return list(dict.fromkeys((*owners, *replicas)))

        return [holders(number) for number in range(len(plan.state_layers))]


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


class Turn:
    """Collects the commands of one step; `state` is replaced, never written."""

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self.state, self.now = state, now
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        self.state = changed(self.state, changes)

    def enter(self, phase: str) -> None:
        self.set(phase=phase, phase_since=self.now)

    def worker(self, worker: WorkerId, **changes: Any) -> None:
        if worker in self.state.workers:
            new = changed(self.state.workers[worker], changes)
            self.set(workers={**self.state.workers, worker: new})

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
