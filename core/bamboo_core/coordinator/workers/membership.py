"""Membership in the job: joining, notices, declaring workers lost, and requesting new ones."""

from collections import Counter
from collections.abc import Collection, Iterable

from bamboo_core.control import protocol
from bamboo_core.coordinator.events import AddWorkers, Emit, RemoveWorker, Send
from bamboo_core.coordinator.grids.choosing import are_owners_apart
from bamboo_core.coordinator.grids.holding import to_have
from bamboo_core.coordinator.records.workers import Notice
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.workers.failures import by_itself, judge_end, note_end, note_exit
from bamboo_core.job.spec import RedundancyMode
from bamboo_core.names import (
    ALL_BACK_SECONDS,
    ALONE_SECONDS,
    EXIT_OK,
    HEARTBEAT_SECONDS,
    ISOLATED_SECONDS,
    RECONNECT_GRACE_SECONDS,
)
from bamboo_core.planning.plan import Peer, Plan, WorkerId, plan_misfits

SAME_SECONDS = 1.0  # a repeated notice that ends at most this much sooner is not new
LEAST_SECONDS = 5.0  # an old notice alone must not end a worker that has just joined
EARLY_SECONDS = 10.0  # from the end of its notice until a worker that has not joined counts as lost


def joined(turn: Turn, hello: protocol.Hello) -> None:
    """Admit or refuse a worker that opens a channel: a new one, or one that reconnects.

    Refuse a worker that is gone. Refuse an unknown worker that brings a plan if the job is neither Pending nor
    Recovering, or if the plan cannot be this job's.
    """
    state, worker, plan = turn.state, hello.worker, hello.plan
    if worker in state.membership.gone:
        turn.refuse(worker, "DeclaredLost", f"{worker} was declared lost and cannot rejoin")
        return
    peer = Peer(worker=worker, host=hello.host, port=hello.port, zone=hello.zone, node=hello.node)
    if worker in state.workers:
        _returned(turn, worker, peer)
        return
    if plan and state.phase not in ("Pending", "Recovering"):
        turn.put(state.membership.without(worker).withdrawing(1))
        turn.refuse(worker, "NotInPlan", f"{worker} is no longer a worker of this job")
        turn.do(RemoveWorker(worker))
        return
    if plan and (problems := plan_misfits(plan, state.spec)):
        turn.put(state.membership.without(worker).withdrawing(1))
        why = f"{worker} sent a plan that cannot be this job's: {problems[0]}"
        turn.refuse(worker, "PlanUnsound", why)
        turn.do(Emit("PlanUnsound", why, True), RemoveWorker(worker))
        return
    turn.put(state.workers.joined(hello, peer, turn.now), state.membership.withdrawing(1))
    turn.do(Send(worker, state.terms.welcome()))
    turn.do(Emit("WorkerJoined", f"{worker} joined" + _where(peer)))
    if plan:
        _take_plan(turn, plan)
    if (early := state.membership.leaving.get(worker)) is not None:
        seconds = max(LEAST_SECONDS, early.until - turn.now)
        early = replace(early, until=turn.now + seconds, seconds=seconds)
        turn.put(turn.state.membership.with_notice(worker, early))
        _announce(turn, worker, seconds)


def _where(peer: Peer) -> str:
    """Describe a worker's node and zone, as the end of a sentence; "" if both are unknown."""
    return (f" on node {peer.node}" if peer.node else "") + (f" in zone {peer.zone}" if peer.zone else "")


def _returned(turn: Turn, worker: WorkerId, peer: Peer) -> None:
    """Handle a reconnected worker. Repeat the messages that it still needs, since some may have been lost."""
    state = turn.state
    back = replace(state.workers[worker], peer=peer, seen=turn.now, busy=0.0, cut_since=None, released=False)
    links = {pair: since for pair, since in state.liveness.links.items() if pair[0] != worker}
    turn.put(
        state.workers.having(worker, back),
        replace(state.liveness, links=links),  # the worker says again whom it cannot reach
        state.layers.not_asked_of(worker),
    )
    turn.do(Send(worker, state.terms.welcome()))
    current = state.phase != "Restoring"
    if current and state.plan and state.workers[worker].ready and state.plan.worker_ids() <= state.workers.keys():
        turn.do(Send(worker, protocol.SendPlan(plan=state.plan)))
    if state.inquiry.began_at is not None:
        turn.do(Send(worker, protocol.ReportRequest()))


def _take_plan(turn: Turn, plan: Plan) -> None:
    """Adopt the plan that a worker brings to a restarted coordinator, if it is newer, and wait for its workers."""
    old = turn.state.plan
    if turn.state.phase == "Pending" or old is None:
        turn.enter("Recovering")  # the time limit for the others starts with the first worker that returns
    turn.put(turn.state.plans.brought(plan))


def declare_lost(
    turn: Turn,
    worker: WorkerId,
    detail: str,
    exit_code: int | None = None,
    *,
    known: bool = False,
    removed: bool = False,
) -> None:
    """Declare a worker lost, for good. If it is gone already, only record how it ended (`note_exit`).

    detail: why it is lost, for the user. exit_code: a negative one (a signal's) counts as None. known: the shell
    reports the worker's end, so without an exit code the worker was taken away; if False, the shell may report the end
    later. removed: the shell ended the worker after it had been declared lost.
    """
    state, exit_code = turn.state, None if exit_code is not None and exit_code < 0 else exit_code
    if worker in state.membership.gone:
        note_exit(turn, worker, detail, exit_code, removed=removed)
        return
    if worker not in state.workers:
        _lost_early(turn, worker, detail, exit_code)
        return
    record, noticed = state.workers[worker], not state.stays(worker)
    had_part = state.plan is not None and worker in state.plan.holders()
    turn.put(
        state.workers.without({worker}),
        state.membership.losing(worker, taken=not noticed),  # also if its end is not known yet
        state.liveness.losing(worker, turn.now if record.cut_since is None else record.cut_since),
        state.layers.not_asked_of(worker),
        replace(state.plans, applied=state.plans.applied - {worker}),
    )
    if not noticed or had_part:
        turn.do(Emit("WorkerLost", f"{worker} is lost: {detail}", True))
    else:
        turn.do(Emit("WorkerLeft", f"{worker} has left after its notice"))
    turn.refuse(worker, "DeclaredLost", detail)
    turn.do(RemoveWorker(worker))
    if record.released:
        return
    note_end(turn, worker, detail, disrupted=noticed or (known and exit_code is None))
    if not known:
        turn.put(replace(turn.state.worker_ends, unexplained=turn.state.worker_ends.unexplained | {worker}))
    judge_end(turn, worker, detail, None if noticed and exit_code == EXIT_OK else exit_code)


def _lost_early(turn: Turn, worker: WorkerId, detail: str, exit_code: int | None) -> None:
    """Declare lost a worker that has not joined this coordinator.

    In phase Recovering, an earlier coordinator may have known the worker. A worker without an exit code then counts as
    taken away, and a worker that exited with 0 as having left on request: it was given back, or the earlier coordinator
    counted the preemption at its notice.
    """
    state = turn.state
    recovering = state.phase == "Recovering"
    by_order = not exit_code
    turn.put(state.membership.losing(worker, taken=recovering and exit_code is None).withdrawing(1))
    turn.do(Emit("WorkerLost", f"{worker} was lost before it joined: {detail}", True), RemoveWorker(worker))
    if recovering and by_order:
        return
    if by_itself(exit_code):
        note_end(turn, worker, detail, disrupted=False)
    judge_end(turn, worker, detail, exit_code)


def absent(turn: Turn, workers: Collection[WorkerId], detail: str) -> None:
    """Record as lost the workers that vanished while no coordinator ran; skip workers that joined or are gone."""
    state = turn.state
    new = frozenset(workers) - state.workers.keys() - state.membership.gone
    turn.put(state.membership.absent(new))
    turn.do(
        *(
            Emit("WorkerLost", f"{worker} was lost while no operator was active: {detail}", True)
            for worker in sorted(new)
        )
    )


def notice(
    turn: Turn,
    worker: WorkerId,
    seconds: float,
    *,
    wanted: bool = False,
    own: bool = False,
    cause: Emit | None = None,
) -> None:
    """Record a preemption notice; a later notice can only shorten the time.

    If the worker has not joined yet, the notice is announced when it joins. seconds: until the worker is taken away.
    wanted: the shell gives the worker back. own: the worker itself reports the notice. With `wanted` or `own`, the
    notice of a worker that has joined is final. cause: an event for the user, emitted if the notice is new.
    """
    members, here, until = turn.state.membership, worker in turn.state.workers, turn.now + seconds
    if worker in members.gone:
        return
    known = members.leaving.get(worker)
    before = known or Notice()
    final = before.final or (here and (own or wanted))
    if known is not None and known.until <= until + SAME_SECONDS:
        turn.put(members.with_notice(worker, replace(known, final=final)))
        return
    again = known is not None and not known.replaced
    spared = before.spared or (here and wanted and not again)
    new = replace(before, until=until, seconds=seconds, final=final, replaced=False, spared=spared)
    turn.put(members.with_notice(worker, new))
    if again:
        return
    if cause is not None:
        turn.do(cause)
    if here and wanted:
        turn.do(Emit("GivenBack", f"{worker} is no longer needed"))
    elif here:
        _announce(turn, worker, seconds)


def _announce(turn: Turn, worker: WorkerId, seconds: float) -> None:
    """Count the notice of a worker that has joined, unless it is counted already, and emit an event for the user."""
    members = turn.state.membership
    if worker in members.counted:
        turn.put(replace(members, counted=members.counted - {worker}))  # the next notice is another one
    else:
        turn.put(replace(members, notices=members.notices + 1, preemptions=members.preemptions + 1))
    turn.do(Emit("NoticeReceived", f"{worker} will be taken away in {seconds:.0f} s", True))


def notice_withdrawn(turn: Turn, worker: WorkerId) -> None:
    """Withdraw a worker's notice, unless it is final or the coordinator has asked the worker to leave."""
    record, known = turn.state.workers.get(worker), turn.state.membership.leaving.get(worker)
    if known is None or known.final or (record is not None and record.released):
        return
    turn.put(turn.state.membership.not_leaving(worker))
    if record is not None:
        turn.do(Emit("NoticeWithdrawn", f"the notice of {worker} is withdrawn"))


def channel_closed(turn: Turn, worker: WorkerId) -> None:
    """Record a closed channel. The worker may reconnect for a while, but is lost if a peer cannot reach it either."""
    record = turn.state.workers.get(worker)
    if record is None:
        return
    since = turn.now if record.cut_since is None else record.cut_since
    turn.put(turn.state.workers.having(worker, replace(record, cut_since=since)))
    witness = next((reporter for reporter, peer in turn.state.liveness.links if peer == worker), None)
    if witness:
        declare_lost(turn, worker, f"its control channel is closed, and {witness} cannot reach it")


def peer_down(turn: Turn, reporter: WorkerId, message: protocol.PeerDown) -> None:
    peer = turn.state.workers.get(message.peer)
    if peer is None or message.peer == reporter:
        return
    if peer.cut_since is not None:
        declare_lost(turn, message.peer, f"its control channel is closed, and {reporter} cannot reach it")
    elif (reporter, message.peer) not in turn.state.liveness.links:
        known = turn.state.liveness
        turn.put(replace(known, links={**known.links, (reporter, message.peer): turn.now}))


def peer_up(turn: Turn, reporter: WorkerId, message: protocol.PeerUp) -> None:
    known, mended = turn.state.liveness, (reporter, message.peer)
    turn.put(replace(known, links={pair: since for pair, since in known.links.items() if pair != mended}))


def check_deadlines(turn: Turn) -> None:
    """Declare workers lost that were silent, cut off or unreachable for too long, or whose notice has expired."""
    now, limit = turn.now, turn.state.terms.heartbeat_timeout
    silent = [w for w, r in turn.state.workers.items() if r.cut_since is not None or now - r.seen - limit > 0]
    missed = {worker: late for worker in silent if (late := _missed(turn, worker)) > 0}
    patience = _patience(turn) if missed else 0.0
    for worker, late in missed.items():
        if late > patience:
            record = turn.state.workers[worker]
            silent_for = f"no heartbeat for {now - record.seen:.1f} s"
            declare_lost(turn, worker, silent_for if record.cut_since is None else "its control channel stays closed")
    for worker, notice in turn.state.membership.leaving.items():
        # on a node that hangs, the pod of a worker that has not joined may be on its way out without end
        if now > notice.until + (0.0 if worker in turn.state.workers else EARLY_SECONDS):
            declare_lost(turn, worker, "the deadline of its notice has passed")
    broken = [pair for pair, since in turn.state.liveness.links.items() if now - since > limit]
    if broken:
        worker = worker_to_blame(broken, _part(turn))
        declare_lost(turn, worker, f"one of its data links has been broken for more than {limit:g} s")


def _missed(turn: Turn, worker: WorkerId) -> float:
    """Return the seconds by which a worker's sign of life is overdue; 0 or less if it is not overdue.

    A commit counts as a sign of life of every owner, since all owners take part in it.
    """
    state, record = turn.state, turn.state.workers[worker]
    cut = record.cut_since is not None
    heard = record.cut_since if record.cut_since is not None else record.seen
    limit = RECONNECT_GRACE_SECONDS if cut else state.terms.heartbeat_timeout
    late = turn.now - heard - limit
    if late > 0 and state.step > 0 and state.plan is not None and state.plan.owned_by(worker):
        return turn.now - max(heard, state.progress.last_at) - limit
    return late


def _patience(turn: Turn) -> float:
    """Return the extra seconds to wait for overdue workers: 0 unless most workers are silent at once, or were lately.

    If most workers are silent, the coordinator itself may be unreachable. Channels close and reopen one by one, so
    workers count as silent before they are overdue, and the wait still applies for ALL_BACK_SECONDS afterwards.
    """
    state, latest = turn.state, turn.now - 2 * HEARTBEAT_SECONDS
    silent = sum(record.cut_since is not None or record.seen < latest for record in state.workers.values())
    extra = ISOLATED_SECONDS if 2 * silent > len(state.workers) else 0.0
    if silent and silent == len(state.workers):
        extra = ALONE_SECONDS
    before = state.liveness.patience if turn.now < state.liveness.patient_until else 0.0
    if extra and extra >= before:
        turn.put(replace(state.liveness, patience=extra, patient_until=turn.now + ALL_BACK_SECONDS))
    return max(extra, before)


def worker_to_blame(broken: Iterable[tuple[WorkerId, WorkerId]], part: Counter[WorkerId]) -> WorkerId:
    """Return the worker with the most broken links; of several, the one with the smallest part in the plan."""
    degree = Counter(worker for pair in broken for worker in pair)
    return min(degree, key=lambda w: (-degree[w], part[w], w))


def _part(turn: Turn) -> Counter[WorkerId]:
    """Return each worker's part in the plan: 1000 for each cell that it owns, 1 for each cell that it replicates."""
    part: Counter[WorkerId] = Counter()
    if plan := turn.state.plan:
        for cell in plan.cells():
            part[plan.at(cell).owner] += 1000
            part.update(plan.at(cell).replicas)
    return part


def request_workers(turn: Turn) -> None:
    """Request missing workers from the shell, and the model's layers from a ready worker if they are needed."""
    state = turn.state
    if state.phase not in ("Pending", "Running", "Restoring"):
        return
    missing = 0 if state.ending.stopping else _missing(state)  # a job about to end needs no new worker
    if missing > 0 and turn.now >= state.admission.ask_at:
        turn.put(replace(state.membership, requested=state.membership.requested + missing))
        turn.do(AddWorkers(missing))
    plan, restoring = state.plan, state.phase == "Restoring"
    wanted = plan is None or restoring or state.grids.resize or state.splits.resplit or plan.sources
    if (wanted or _may_choose(state)) and state.layers.costs is None and state.layers.asked is None and state.ready:
        first = next(iter(state.ready))
        turn.put(replace(state.layers, asked=first))
        turn.do(Send(first, protocol.ProfileRequest()))


def _may_choose(state: CoordinatorState) -> bool:
    """Return whether the grid or the replicas may change, because workers have changed or stages lack replicas.

    While the job trains, the coordinator requests the model's layers if this is True or another decision needs them.
    """
    plan, auto = state.plan, state.spec.redundancy.mode is RedundancyMode.AUTO
    if plan is None or (state.spec.elastic is None and not auto):
        return False
    bare = plan.mode is RedundancyMode.NONE
    bare = bare and (plan.target.pipelines <= state.spec.redundancy.kept or not are_owners_apart(state, plan))
    return bare or (state.spec.elastic is not None and len(state.ready) != len(plan.owners()))


def surplus_requests(state: CoordinatorState) -> int:
    """Return how many requested workers are no longer wanted, such as after an edit or a withdrawn notice.

    A shell drops at most that many workers that it could not start yet, and reports their number (RequestsWithdrawn).
    """
    return min(state.membership.requested, max(0, -_missing(state)))


def _missing(state: CoordinatorState) -> int:
    """Return the number of workers to request; negative if there are, or will be, too many."""
    staying = len(state.workers) - len(state.noticed)
    return to_have(state) - staying - state.membership.requested
