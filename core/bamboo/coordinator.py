"""The coordinator: a pure step function from (state, event, now) to (state, commands).

It alone declares a worker lost and makes plans. It never waits: training goes on while it is away.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bamboo import protocol
from bamboo.events import (
    AddWorkers,
    ChannelClosed,
    Command,
    Emit,
    Event,
    Finish,
    Interrupted,
    Notice,
    Outcome,
    Received,
    RemoveWorker,
    Send,
    Takeover,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from bamboo.grid import initial_plan, split_layers
from bamboo.names import HEARTBEAT_TIMEOUT_SECONDS, RECONNECT_GRACE_SECONDS
from bamboo.plan import Cell, Peer, Plan, WorkerId, plan_problems
from bamboo.reconcile import StageLost, View, drain, improve, takeover
from bamboo.spec import JobSpec, RedundancyMode

DRAIN_COMMITS = 2  # a worker without a part stays until its log cannot be needed any more
SAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that joined and is not known to be lost."""

    peer: Peer
    seen: float
    cut_since: float | None = None  # the channel is closed since then
    notice_until: float | None = None
    free_since_step: int | None = None  # it has a notice and no part any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A takeover in progress, until every new owner has reported."""

    epoch: int
    lost_at: float
    decided_at: float
    notice: bool
    victims: tuple[tuple[Cell, WorkerId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    spec: JobSpec
    manifest: dict[str, Any]
    secret: str
    save_path: str | None
    started: float
    heartbeat_timeout: float
    phase: str = "Pending"  # Pending, Running, Saving, Over
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    gone: frozenset[WorkerId] = frozenset()
    requested: int = 0  # workers asked for and not joined yet
    profiling: WorkerId | None = None
    costs: tuple[float, ...] | None = None
    plan: Plan | None = None
    applied: frozenset[WorkerId] = frozenset()
    synced: frozenset[tuple[Cell, WorkerId]] = frozenset()
    recoveries: tuple[Recovery, ...] = ()
    losses: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    last_progress: float = 0.0
    preemptions: int = 0
    notices: int = 0
    takeovers: tuple[Takeover, ...] = ()
    finished: tuple[tuple[Cell, str], ...] = ()
    saved: frozenset[WorkerId] = frozenset()
    saving_since: float = 0.0

    @property
    def step(self) -> int:
        """Committed steps."""
        return len(self.losses)


def initial(
    spec: JobSpec,
    manifest: dict[str, Any],
    *,
    secret: str,
    save_path: str | None,
    now: float,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS,
) -> State:
    """The state before the first event."""
    return State(
        spec=spec, manifest=manifest, secret=secret, save_path=save_path, started=now,
        heartbeat_timeout=heartbeat_timeout, last_progress=now,
    )  # fmt: skip


class _Turn:
    """Collects the commands of one step; `state` is replaced, never written."""

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now = state, now
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def worker(self, worker: WorkerId, **changes: Any) -> None:
        if worker in self.state.workers:
            new = replace(self.state.workers[worker], **changes)
            self.set(workers={**self.state.workers, worker: new})

    def do(self, *commands: Command) -> None:
        self.commands += commands

    def finish(self, outcome: Outcome, reason: str, message: str) -> None:
        self.set(phase="Over")
        for worker in self.state.workers:
            self.do(Send(worker, protocol.Stop(reason=reason, message=message)), RemoveWorker(worker))
        self.do(Emit(reason, message, outcome is not Outcome.COMPLETE), Finish(outcome, reason, message))


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Take one event in. Pure: equal arguments give equal results."""
    if state.phase == "Over":
        if isinstance(event, WorkerJoined):
            stop = protocol.Stop(reason="JobOver", message="the job is over")
            return state, (Send(event.hello.worker, stop), RemoveWorker(event.hello.worker))
        return state, ()
    turn = _Turn(state, now)
    match event:
        case WorkerJoined(hello):
            _joined(turn, hello)
        case Received(worker, message):
            _received(turn, worker, message)
        case ChannelClosed(worker):
            turn.worker(worker, cut_since=now)
        case WorkerLost(worker, detail):
            _lost(turn, worker, detail)
        case Notice(worker, seconds):
            _notice(turn, worker, seconds)
        case Interrupted():
            turn.finish(Outcome.INTERRUPTED, "Interrupted", "stopped by the user")
        case Tick():
            _tick(turn)
    if turn.state.phase != "Over":
        _staff(turn)
        _reconcile(turn)
    return turn.state, tuple(turn.commands)


# workers


def _joined(turn: _Turn, hello: protocol.Hello) -> None:
    state, worker = turn.state, hello.worker
    if worker in state.gone:
        turn.do(
            Send(
                worker,
                protocol.Refused(reason="DeclaredLost", message=f"{worker} was declared lost and may not return"),
            )
        )
        return
    peer = Peer(worker=worker, host=hello.host, port=hello.port, zone=hello.zone)
    if worker in state.workers:  # again, after a cut
        turn.worker(worker, peer=peer, seen=turn.now, cut_since=None)
        if state.plan:
            turn.do(Send(worker, protocol.SendPlan(plan=state.plan)))
        return
    turn.set(
        workers={**state.workers, worker: Worker(peer=peer, seen=turn.now)},
        requested=max(0, state.requested - 1),
    )
    turn.do(Send(worker, protocol.Welcome(manifest=state.manifest, secret=state.secret)))
    turn.do(Emit("WorkerJoined", f"{worker} joined" + (f" in zone {peer.zone}" if peer.zone else "")))


def _lost(turn: _Turn, worker: WorkerId, detail: str) -> None:
    state = turn.state
    if worker in state.gone:
        return
    if worker not in state.workers:
        turn.set(gone=state.gone | {worker}, requested=max(0, state.requested - 1))
        turn.finish(Outcome.FAILED, "WorkerStartFailed", f"{worker} ended before it joined: {detail}")
        return
    record = state.workers[worker]
    had_part = state.plan is not None and any(worker in state.plan.at(c).holders for c in state.plan.cells())
    turn.set(
        workers={w: r for w, r in state.workers.items() if w != worker},
        gone=state.gone | {worker},
        applied=state.applied - {worker},
        preemptions=state.preemptions + (record.notice_until is None),
        profiling=None if state.profiling == worker else state.profiling,
    )
    if record.notice_until is None or had_part:
        turn.do(Emit("WorkerLost", f"{worker} is lost: {detail}", True))
    else:
        turn.do(Emit("WorkerLeft", f"{worker} has left after its notice"))
    turn.do(Send(worker, protocol.Refused(reason="DeclaredLost", message=detail)), RemoveWorker(worker))


def _notice(turn: _Turn, worker: WorkerId, seconds: float) -> None:
    record = turn.state.workers.get(worker)
    if record is None or record.notice_until is not None:
        return
    turn.worker(worker, notice_until=turn.now + seconds)
    turn.set(notices=turn.state.notices + 1, preemptions=turn.state.preemptions + 1)
    turn.do(Emit("NoticeReceived", f"{worker} will be taken away in {seconds:.0f} s", True))


def _tick(turn: _Turn) -> None:
    state, now = turn.state, turn.now
    for worker, record in state.workers.items():
        if record.cut_since is not None and now - record.cut_since > RECONNECT_GRACE_SECONDS:
            _lost(turn, worker, f"its channel is closed for more than {RECONNECT_GRACE_SECONDS:g} s")
        elif now - record.seen > state.heartbeat_timeout:
            _lost(turn, worker, f"no heartbeat for {now - record.seen:.1f} s")
        elif record.notice_until is not None and now > record.notice_until:
            _lost(turn, worker, "the deadline of its notice has passed")
    limit = state.spec.progress_deadline_seconds
    if turn.state.phase == "Running" and limit and now - state.last_progress > limit:
        turn.finish(Outcome.FAILED, "ProgressDeadlineExceeded", f"no step was committed for {limit} s")
    if turn.state.phase == "Saving" and now - state.saving_since > SAVE_SECONDS:
        turn.finish(Outcome.FAILED, "SaveTimeout", f"the workers did not save within {SAVE_SECONDS:g} s")


def _staff(turn: _Turn) -> None:
    """Ask for the workers that are missing, and for the profile once there is a worker."""
    state, spec = turn.state, turn.state.spec
    if state.phase in ("Over", "Saving"):
        return
    staying = sum(1 for w in state.workers.values() if w.notice_until is None)
    needed = spec.topology.stages * spec.topology.pipelines + spec.standby.workers
    missing = needed - staying - state.requested
    if missing > 0:
        turn.set(requested=state.requested + missing)
        turn.do(AddWorkers(missing))
    if state.costs is None and state.profiling is None and state.workers:
        first = next(iter(state.workers))
        turn.set(profiling=first)
        turn.do(Send(first, protocol.ProfileRequest()))


# messages


def _received(turn: _Turn, worker: WorkerId, message: protocol.Message) -> None:
    record = turn.state.workers.get(worker)
    if record is None:
        return
    turn.worker(worker, seen=turn.now)
    handler = _HANDLERS.get(type(message))
    if handler:
        handler(turn, worker, message)


def _profile(turn: _Turn, worker: WorkerId, message: protocol.Profile) -> None:
    turn.set(costs=message.costs)


def _peer_down(turn: _Turn, worker: WorkerId, message: protocol.PeerDown) -> None:
    peer = turn.state.workers.get(message.peer)
    if peer is None:
        return
    if peer.cut_since is not None:
        _lost(turn, message.peer, f"its channel is closed, and {worker} cannot reach it")
    elif turn.state.plan and message.epoch == turn.state.plan.epoch:
        turn.do(Emit("LinkDown", f"{worker} lost its link to {message.peer}; it is formed again", True))


def _plan_applied(turn: _Turn, worker: WorkerId, message: protocol.PlanApplied) -> None:
    if turn.state.plan and message.epoch == turn.state.plan.epoch:
        turn.set(applied=turn.state.applied | {worker})


def _replica_synced(turn: _Turn, worker: WorkerId, message: protocol.ReplicaSynced) -> None:
    plan = turn.state.plan
    if plan and message.cell in plan.cells() and plan.at(message.cell).owner == worker:
        turn.set(synced=turn.state.synced | {(message.cell, message.replica)})


def _step_committed(turn: _Turn, worker: WorkerId, message: protocol.StepCommitted) -> None:
    state = turn.state
    if message.step != state.step:
        return
    turn.set(losses=(*state.losses, message.loss), last_progress=turn.now)
    if message.seconds > 0:
        turn.set(step_seconds=(*state.step_seconds, message.seconds)[-200:])
    if message.loss != message.loss or message.loss in (float("inf"), float("-inf")):
        turn.finish(Outcome.FAILED, "LossNotFinite", f"the loss of step {message.step} is {message.loss}")


def _taken_over(turn: _Turn, worker: WorkerId, message: protocol.TakenOver) -> None:
    state = turn.state
    for recovery in state.recoveries:
        victim = dict(recovery.victims).get(message.cell)
        if victim is None or message.epoch < recovery.epoch:
            continue
        taken = Takeover(
            epoch=recovery.epoch, victim=victim, worker=worker, pipeline=message.cell.pipeline,
            stage=message.cell.stage, step=message.step, notice=recovery.notice,
            decide_ms=(recovery.decided_at - recovery.lost_at) * 1e3, reform_ms=message.reform_ms,
            recompute_ms=message.recompute_ms, forwards=message.forwards, backwards=message.backwards,
        )  # fmt: skip
        left = tuple((c, v) for c, v in recovery.victims if c != message.cell)
        others = tuple(r for r in state.recoveries if r is not recovery)
        turn.set(
            takeovers=(*state.takeovers, taken),
            recoveries=(*others, replace(recovery, victims=left)) if left else others,
        )
        turn.do(
            Emit(
                "TakenOver",
                f"{worker} runs stage {taken.stage} of pipeline {taken.pipeline} in place of {victim}:"
                f" step {taken.step}, pause {taken.pause_ms:.0f} ms, repeated {taken.forwards} forwards"
                f" and {taken.backwards} backwards",
            )
        )
        return


def _cell_finished(turn: _Turn, worker: WorkerId, message: protocol.CellFinished) -> None:
    state = turn.state
    if state.plan is None:
        return
    finished = {**dict(state.finished), message.cell: message.digest}
    turn.set(finished=tuple(sorted(finished.items())))
    cells = [c for c in state.plan.cells() if c.pipeline < state.plan.target.pipelines]
    if any(c not in finished for c in cells) or state.phase != "Running":
        return
    by_stage = [{finished[c] for c in cells if c.stage == s} for s in range(len(state.plan.stages))]
    if any(len(digests) > 1 for digests in by_stage):
        turn.finish(Outcome.FAILED, "PipelinesDiverged", "pipelines ended with different weights: a bug in Bamboo")
    elif state.save_path is None:
        turn.finish(Outcome.COMPLETE, "Complete", f"all {state.step} steps are done")
    else:
        turn.set(phase="Saving", saving_since=turn.now)
        for owner in sorted(_savers(turn.state)):
            turn.do(Send(owner, protocol.Save(path=state.save_path)))


def _savers(state: State) -> set[WorkerId]:
    assert state.plan is not None
    return {state.plan.at(Cell(0, s)).owner for s in range(len(state.plan.stages))}


def _saved(turn: _Turn, worker: WorkerId, message: protocol.Saved) -> None:
    turn.set(saved=turn.state.saved | {worker})
    if turn.state.phase == "Saving" and _savers(turn.state) <= turn.state.saved:
        turn.finish(Outcome.COMPLETE, "Complete", f"all {turn.state.step} steps are done; weights saved")


def _notice_received(turn: _Turn, worker: WorkerId, message: protocol.NoticeReceived) -> None:
    _notice(turn, worker, message.seconds)


def _worker_failed(turn: _Turn, worker: WorkerId, message: protocol.WorkerFailed) -> None:
    turn.finish(Outcome.FAILED, message.reason, f"{worker}: {message.message}")


def _bye(turn: _Turn, worker: WorkerId, message: protocol.Bye) -> None:
    record = turn.state.workers.get(worker)
    if record and record.notice_until is not None:
        _lost(turn, worker, "it has left")


_HANDLERS: dict[type, Callable[[_Turn, WorkerId, Any], None]] = {
    protocol.Profile: _profile,
    protocol.PeerDown: _peer_down,
    protocol.PlanApplied: _plan_applied,
    protocol.ReplicaSynced: _replica_synced,
    protocol.StepCommitted: _step_committed,
    protocol.TakenOver: _taken_over,
    protocol.CellFinished: _cell_finished,
    protocol.Saved: _saved,
    protocol.NoticeReceived: _notice_received,
    protocol.WorkerFailed: _worker_failed,
    protocol.Bye: _bye,
}


# plans


def _reconcile(turn: _Turn) -> None:
    state = turn.state
    if state.plan is None:
        _start(turn)
        return
    plan = takeover(_view(state))
    if isinstance(plan, StageLost):
        cells = ", ".join(f"stage {c.stage} of pipeline {c.pipeline}" for c in plan.cells)
        message = f"{cells}: owner and replica were lost together; not recoverable without a checkpoint"
        turn.finish(Outcome.UNRECOVERABLE, "StageLost", message)
        return
    if plan:
        _issue(turn, plan)
        return
    over = state.phase != "Running" or state.step >= state.spec.training.steps
    if over or not state.plan.worker_ids() <= state.applied:
        return
    proposal = drain(_view(state)) or improve(_view(state))
    if proposal:
        _issue(turn, proposal)
    else:
        _release(turn)


def _start(turn: _Turn) -> None:
    state, spec = turn.state, turn.state.spec
    ready = [w.peer for w in state.workers.values() if w.notice_until is None]
    if state.costs is None or len(ready) < spec.topology.stages * spec.topology.pipelines:
        return
    try:
        stages = split_layers(state.costs, spec.topology.stages)
    except ValueError as error:
        turn.finish(Outcome.FAILED, "InvalidTopology", str(error))
        return
    plan = initial_plan(
        ready,
        stages,
        spec.topology.pipelines,
        spec.training.microbatches,
        spec.redundancy.mode != RedundancyMode.NONE,
    )
    turn.set(phase="Running", last_progress=turn.now)
    _issue(turn, plan)


def _view(state: State) -> View:
    assert state.plan is not None
    return View(
        plan=state.plan,
        live={w: r.peer for w, r in state.workers.items()},
        leaving=frozenset(w for w, r in state.workers.items() if r.notice_until is not None),
        synced=state.synced,
        redundant=state.spec.redundancy.mode != RedundancyMode.NONE,
    )


def _issue(turn: _Turn, plan: Plan) -> None:
    """Make a plan the newest one and send it to everybody."""
    state, old = turn.state, turn.state.plan
    problems = plan_problems(plan)
    assert not problems, f"an unsound plan: {problems}"
    synced = set()
    victims = []
    for cell in plan.cells():
        now = plan.at(cell)
        before = old.at(cell) if old and cell.pipeline < len(old.pipelines) else None
        if before and before.owner == now.owner:
            synced |= {(cell, w) for w in now.replicas if (cell, w) in state.synced}
        elif before:
            synced |= {(cell, w) for w in now.replicas if w == before.owner}
            victims.append((cell, before.owner))
    turn.set(plan=plan, applied=frozenset(), synced=frozenset(synced))
    lost_victims = [v for _, v in victims if v in state.gone]
    left = [v for _, v in victims if v in state.workers and state.workers[v].notice_until is not None]
    if lost_victims or left:
        recovery = Recovery(
            epoch=plan.epoch,
            lost_at=turn.now,
            decided_at=turn.now,
            notice=not lost_victims,
            victims=tuple(victims),
        )
        turn.set(recoveries=(*turn.state.recoveries, recovery))
    turn.do(Emit(plan.reason, plan.message, plan.reason == "Takeover"))
    message = protocol.SendPlan(plan=plan)
    turn.do(*(Send(w, message) for w in plan.worker_ids()))


def _release(turn: _Turn) -> None:
    """Let workers with a notice go once they have no part and their log cannot be needed any more."""
    state = turn.state
    assert state.plan is not None
    for worker, record in state.workers.items():
        if record.notice_until is None or any(worker in state.plan.at(c).holders for c in state.plan.cells()):
            continue
        if record.free_since_step is None:
            turn.worker(worker, free_since_step=state.step)
        elif state.step >= record.free_since_step + DRAIN_COMMITS:
            stop = protocol.Stop(reason="Drained", message="no part is left; leave")
            turn.do(Send(worker, stop), RemoveWorker(worker))
