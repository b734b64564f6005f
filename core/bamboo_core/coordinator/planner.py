"""Choice of the next plan: at once after a loss or a cut, else once workers have applied the newest plan."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from bamboo_core.control import protocol
from bamboo_core.coordinator.checkpointing import copies, restoring, saving
from bamboo_core.coordinator.events import Emit, Outcome, RemoveWorker, RestoreCause, Send
from bamboo_core.coordinator.grids import choosing, following, holding
from bamboo_core.coordinator.records.job import Recovery
from bamboo_core.coordinator.records.workers import Notice
from bamboo_core.coordinator.replacing import replace
from bamboo_core.coordinator.splits import cut, filling
from bamboo_core.coordinator.state import CoordinatorState, Turn
from bamboo_core.coordinator.workers.platforms import fitting, refuse_misfits
from bamboo_core.coordinator.workers.reconnection import recovered
from bamboo_core.job.spec import RedundancyMode, schedules, stabilization_seconds
from bamboo_core.planning.desired import PlanningView, Urgency
from bamboo_core.planning.grid import initial_plan, layer_ranges
from bamboo_core.planning.plan import Cell, Plan, WorkerId, plan_problems
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of, in_places
from bamboo_core.planning.transitions import StageLost, drain, drop_old_layouts, improve, resize, switch_mode, takeover

ASKING_SECONDS = 1.0  # limit for asking workers which states they hold
LAYERS_SECONDS = 30.0  # limit for finding copies of layers; a holder may be busy restoring its stages
ROUND_SECONDS = 0.1  # at least, between two rounds of questions
END_SECONDS = 5.0  # wait before a stage is given up: news of how its workers ended may come late
SHOWN_ENDS = 3  # workers in a sentence
ANEW = 1.05  # factor by which the rest of a step must take longer than the whole step on another grid
REPORT_STEPS = 4  # after these and REPORT_SECONDS a missing report of a takeover counts as lost
REPORT_SECONDS = 60.0
DRAIN_COMMITS = 2  # commits for which a worker without a stage stays, because its log may be needed


def replan(turn: Turn) -> None:
    """Issue the next plan if one is due; otherwise ask for lost states, request a cut, or release workers."""
    turn.put(replace(turn.state.plans, steady=False))
    if turn.state.phase == "Recovering" and not recovered(turn):
        return
    state = turn.state
    if state.plan is None or state.phase == "Restoring":
        _start(turn)
        if turn.state.phase in ("Pending", "Restoring"):
            _release(turn)
        return
    moving = cut.is_moving(state)
    onward = cut.next_plan(turn) if moving or cut.is_cut(state) else cut.last_plan(turn)
    if onward:
        _go_on_from_cut(turn, onward)
        return
    if moving:
        _look_for_layers(turn)
        return
    if state.lost(state.plan):
        plan = takeover(planning_view(state, turn.now))
        if isinstance(plan, StageLost):
            _ask_around(turn, plan)
            return
        if plan:
            _issue(turn, plan)
            return
    if cut.is_cut(state):
        return
    following.watch(turn)
    if _is_sooner_anew(turn.state, turn.now):
        cut.begin_anew(turn)
        return
    filling.watch(turn)
    over = state.phase != "Running" or state.step >= state.spec.training.steps
    if over or not (state.plan.worker_ids() <= state.plans.applied or state.plans.settles(state.step)):
        return
    now = planning_view(turn.state, turn.now).after(turn.state.plans.settled)
    proposal = None if now == state.plans.settled else _better_plan(now)
    if proposal:
        cut.withdraw(turn)
        _issue(turn, proposal)
    elif turn.state.splits.resplit is not None:
        return  # wait for the cut
    elif cut.wants(turn.state, turn.now):
        cut.request(turn)
    else:
        _release(turn)
        _forget_unreported(turn)
        steady = not (now.leaving or now.settles or turn.state.moves.recoveries) and turn.state.grids.resize is None
        steady = steady and turn.state.admission.ask_at <= turn.now and turn.state.holding.aim is None
        steady = steady and (turn.state.spec.elastic is None or choosing.is_measured(turn.state))
        steady = steady and not holding.give_back_surplus(turn)
        turn.put(turn.state.plans.kept_for(now, steady=steady))


def _forget_unreported(turn: Turn) -> None:
    """Stop waiting for overdue reports that a cell has moved (TakenOver): they were probably lost with a channel."""
    moves, step, now = turn.state.moves, turn.state.step, turn.now
    awaited = [r for r in moves.recoveries if step < r.step + REPORT_STEPS or now < r.decided_at + REPORT_SECONDS]
    turn.put(replace(moves, recoveries=tuple(awaited)))


def _is_sooner_anew(state: CoordinatorState, now: float) -> bool:
    """Return whether the step in progress would end clearly sooner if it began anew on the job's next grid.

    False unless the change to that grid is due and needs another split. A step does not begin anew if it is the first
    one after a re-split or, once a step is committed, while workers that own no cell can be filled first.
    """
    plan, grids, rates = state.current_plan, state.grids, state.grids.rates
    if state.phase != "Running" or rates is None or grids.expected is None or state.splits.resplit is not None:
        return False
    if plan.sources or (plan.moved and plan.first_step == state.step) or not cut.is_possible(state):
        return False
    if not cut.is_resized(state, now):
        return False
    if state.ready.keys() - plan.owners() and not restoring.nothing_trained(state):
        return False  # new workers are filled while the step goes on
    return ANEW * grids.expected.seconds < choosing.left(state, rates, now)


def _better_plan(view: PlanningView) -> Plan | None:
    """Return a plan that improves on the view's plan, or None. Pure, so that an equal view need not be tried again."""
    return drain(view) or drop_old_layouts(view) or resize(view) or switch_mode(view) or improve(view)


def planning_view(state: CoordinatorState, now: float) -> PlanningView:
    """Return the planning functions' view of the job: its plan, workers, notices and grid."""
    plan = state.plans.of_step(state.step) or state.current_plan
    aim, usual = _aim(state, now), state.usual_step
    elapsed = (now - state.progress.last_at) / usual if usual else 0.0
    return PlanningView(
        plan=plan,
        live=state.live(plan),
        leaving={w: _urgency(state, state.membership.leaving[w], now) for w in state.noticed},
        synced=state.plans.synced,
        redundancy=choosing.redundancy(state, plan),
        pipelines=aim.pipelines,
        schedule=aim.schedule,
        generation=state.progress.generation,
        spread=state.spec.spread.policy,
        elapsed=min(elapsed, 1.0),
        remaining=(1.0 - elapsed % 1.0) * usual if usual else math.inf,
        settles=state.plans.settles(state.step),
        beforehand=filling.replicas(state),
    )


def _urgency(state: CoordinatorState, notice: Notice, now: float) -> Urgency:
    """Return how soon a worker under notice must hand over its stages.

    NOW: the worker may be gone before the next step boundary. SOON: too little time may be left to copy a state to a
    spare worker: less than half of the notice's time, or less than four steps.
    """
    left, step = notice.until - now, state.usual_step or 0.0
    if left < 1.5 * step:
        return Urgency.NOW
    return Urgency.SOON if left < max(notice.seconds / 2, 4 * step) else Urgency.NONE


def _ask_around(turn: Turn, loss: StageLost) -> None:
    """Ask all workers which states they hold, because no copy of a lost cell's state is known to be in step.

    Issue the takeover that their answers allow; if none is possible in time, the stage is lost (`restoring.lost`).
    """
    state = turn.state
    if state.inquiry.began_at is None:
        _begin_to_ask(turn)
        return
    if (state.current_plan.worker_ids() & state.workers.keys()) - state.inquiry.reports.keys():
        return  # busy workers answer late; the heartbeat finds dead ones
    plan = takeover(replace(planning_view(state, turn.now), reported=usable_copies(state.inquiry.reports)))
    if isinstance(plan, Plan):
        _issue(turn, plan)
        return
    if state.inquiry.asked_at - state.inquiry.began_at < ASKING_SECONDS:  # a state may still be in transit
        if turn.now - state.inquiry.asked_at >= ROUND_SECONDS:
            turn.put(replace(state.inquiry, asked_at=turn.now, reports={}))
            _ask(turn)
        return
    ends = state.worker_ends
    if ends.unexplained & ends.since_commit.keys() and turn.now - state.inquiry.began_at < END_SECONDS:
        return  # if they ended by themselves, that is the reason to show
    restoring.lost(turn, "StageLost", _stage_lost(state, loss))


def _stage_lost(state: CoordinatorState, loss: StageLost) -> str:
    """Describe lost cells for the user: their lost holders, how these ended, and, if known, why there is no copy."""
    plan = state.current_plan
    cells = ", ".join(f"stage {c.stage} of pipeline {c.pipeline}" for c in loss.cells)
    lacking = {c.stage for c in loss.cells}
    holders = dict.fromkeys(w for c in plan.cells() if c.stage in lacking for w in plan.at(c).holders)
    lost = [w for w in holders if w not in state.workers]
    before = [w for w in state.worker_ends.since_commit if w not in holders][-SHOWN_ENDS:]
    text = f"{cells}: lost with {_ended(state, lost)}"
    if before:
        text += f", after {_ended(state, before, lost)} since the last committed step"
    if state.spec.redundancy.mode is RedundancyMode.NONE:
        text += "; redundancy.mode None keeps no other copy"
    elif plan.mode is RedundancyMode.NONE and plan.target.pipelines <= state.spec.redundancy.kept:
        text += "; workers have no room for another copy"
    return text


def _ended(state: CoordinatorState, workers: Sequence[WorkerId], named: Sequence[WorkerId] = ()) -> str:
    """Name workers and how they ended. named: workers named before; "likewise" stands for an end like theirs."""
    ends = state.worker_ends.since_commit
    known = {ends[worker].how for worker in named if worker in ends}
    alike: dict[str, list[WorkerId]] = {}
    for worker in workers:
        alike.setdefault(ends[worker].how if worker in ends else "", []).append(worker)
    parts = []
    for how, group in alike.items():
        names = " and ".join([*filter(None, [", ".join(group[:-1])]), group[-1]])
        parts.append(f"{names} ({'likewise' if how in known else how})" if how else names)
    return " and ".join(parts)


def _begin_to_ask(turn: Turn) -> None:
    turn.put(replace(turn.state.inquiry, began_at=turn.now, asked_at=turn.now, reports={}))
    _ask(turn)


def _ask(turn: Turn) -> None:
    turn.do(*(Send(w, protocol.ReportRequest()) for w in turn.state.workers))


def usable_copies(reports: Mapping[WorkerId, protocol.Report]) -> dict[int, tuple[WorkerId, ...]]:
    """Return, by stage, the workers with a usable copy: at most one commit behind, which a log can replay."""
    newest = max((r.committed for r in reports.values()), default=-1)
    stages = {s for r in reports.values() for s in r.held}
    return {s: tuple(w for w, r in reports.items() if r.held.get(s, -1) >= max(newest, 0)) for s in sorted(stages)}


def _look_for_layers(turn: Turn) -> None:
    """If layers were lost in a move, ask all workers what they hold. Call `restoring.lost` if these layers are still
    lost after LAYERS_SECONDS and no worker's channel is cut.
    """
    state = turn.state
    if not cut.is_lost(turn):
        if state.inquiry.began_at is not None:
            turn.put(state.inquiry.over())
    elif state.inquiry.began_at is None:
        _begin_to_ask(turn)
    elif turn.now - state.inquiry.began_at > LAYERS_SECONDS and all(
        r.cut_since is None for r in state.workers.values()
    ):
        restoring.lost(turn, "StageLost", "layers were lost with their workers while they were split anew")


def _start(turn: Turn) -> None:
    """Issue the first plan of the job, or of a restore, once enough workers are ready and the layers' split and the
    checkpoint are known. End the job if a restore finds no checkpoint and may not begin at step 0.
    """
    state, spec = turn.state, turn.state.spec
    if not restoring.is_known(turn) or (state.layers.costs is None and state.plan is None):
        return
    back, state = turn.state.restoring, turn.state
    if state.phase == "Restoring" and back.found is None and not restoring.may_begin_again(state):
        outcome = Outcome.FAILED if back.reason == RestoreCause.RESULTS_DIFFER else Outcome.UNRECOVERABLE
        turn.finish(outcome, back.reason, f"{back.message}; there is no checkpoint to go back to")
        return
    fit = fitting(state)
    ready = [r.peer for w, r in state.ready.items() if state.stays(w) and r.cut_since is None and w in fit]
    if spec.elastic:
        if not _has_waited(state, len(ready), turn.now):
            return
        following.keep_rates(turn)
        state = turn.state
    grid = _first_grid(state, len(ready))
    stages = _first_stages(state, grid) if grid else None
    if grid is None and spec.elastic and ready:
        following.report_no_grid(turn, len(ready))
    if grid is None or stages is None:
        return
    epoch = state.plan.epoch + 1 if state.plan else 1
    if state.plan and len(state.plan.stages) == grid.stages:
        ready = in_places(state.plan, ready, grid.stages * grid.pipelines)
    spec = choosing.spec_on(state, grid, stages)
    plan = initial_plan(
        ready,
        stages,
        grid.pipelines,
        spec.training,
        spec.redundancy,
        epoch=epoch,
        restore=back.found,
        spread=spec.spread.policy,
        schedule=grid.schedule,
    )
    sources = copies.sources(state, back.found, stages[-1][1], {peer.worker: peer for peer in ready})
    known = state.plan.device_layers if state.plan and state.plan.stages == stages else ()
    layers = known or device_layers(spec, stages, state.layers.costs)
    plan = msgspec.structs.replace(plan, sources=sources, device_layers=layers)
    restoring.begun(turn)
    turn.put(replace(turn.state.splits, resplit=None))
    begins = restoring.nothing_trained(state)  # so that a job which never commits a step ends
    _forget_what_was(turn, plan.first_step, turn.now, keep_ends=begins)
    turn.enter("Running")
    _issue(turn, plan)
    refuse_misfits(turn)


def _first_grid(state: CoordinatorState, ready: int) -> Grid | None:
    """Return the grid to start with; None if workers are too few or, in elastic jobs, no grid is known to fit."""
    topology = state.spec.topology
    if state.spec.elastic is None:
        grid = Grid(topology.stages, topology.pipelines, topology.first_schedule)
        return grid if ready >= grid.cells else None
    return following.grid_for(state, ready)


def _has_waited(state: CoordinatorState, ready: int, now: float) -> bool:
    """Return whether an elastic job may start now: all wanted workers are ready, or it has waited long enough."""
    restoring = state.phase == "Restoring"
    waited = now - (state.course.since if restoring else state.terms.started)
    soon = restoring and waited >= choosing.restart_wait(state)
    return soon or waited >= stabilization_seconds(state.spec) or ready >= holding.to_have(state)


def _first_stages(state: CoordinatorState, grid: Grid) -> tuple[tuple[int, int], ...] | None:
    """Return each stage's layers (first, end): the last plan's if they fit, else new ones; None without costs."""
    if state.plan and len(state.plan.stages) == grid.stages and following.has_room(state, grid, state.plan.stages):
        return state.plan.stages
    if state.layers.costs is None:
        return None
    if split := following.split_of(state, grid):
        return split
    return layer_ranges(state.layers.costs, state.spec.topology, grid.stages, state.spec.worker.devices)


def _forget_what_was(turn: Turn, step: int, since: float, *, keep_ends: bool) -> None:
    """Reset the coordinator's records to the state before `step`, from which all workers start again. since: the time
    from which lack of progress counts, in seconds. keep_ends: keep the workers lost since the last commit, so that a
    job that never commits a step ends after too many losses.
    """
    state = turn.state
    turn.put(
        state.terms.back_at(step),
        state.progress.back_at(step, since),
        replace(state.plans, newest=None, applied=frozenset(), synced=frozenset(), in_force=None),
        replace(state.moves, recoveries=()),
        state.inquiry.over(),
        replace(state.ending, finished=(), finishers={}),
    )
    if not keep_ends:
        turn.put(replace(state.worker_ends, since_commit={}))
    turn.put(replace(state.grids, resize=None), replace(state.splits, filling=None))


def _go_on_from_cut(turn: Turn, plan: Plan) -> None:
    """Issue a plan that begins with a cut's or checkpoint's state, or the one with which workers drop their copies."""
    state = turn.state
    if plan.origin == plan.epoch:
        restoring.repeats(turn, plan.first_step)
        is_first_try = not (state.plan and state.plan.sources)
        since = turn.now if is_first_try else state.progress.last_at
        _forget_what_was(turn, plan.first_step, since, keep_ends=not is_first_try)
    else:
        turn.put(replace(turn.state.splits, resplit=None))
    _issue(turn, plan)


def _aim(state: CoordinatorState, now: float) -> Grid:
    """Return the grid that the next plans aim at, with as many stages as now.

    Another grid counts only once a change to it is due (`following.is_due`), and if it keeps the split. A schedule that
    an edit has excluded gives way to an allowed one if that fits in memory.
    """
    waited = following.is_due(state, now)
    plan, allowed = state.current_plan, schedules(state.spec)
    aim = state.grids.resize[0] if state.grids.resize and waited and not following.splits_anew(state) else grid_of(plan)
    other = aim._replace(schedule=allowed[0])
    return other if aim.schedule not in allowed and following.has_room(state, other, plan.stages) else aim


def _issue(turn: Turn, plan: Plan) -> None:
    """Make a plan the newest one, send it to its workers, and report it to the user."""
    problems = plan_problems(plan)
    assert not problems, f"an unsound plan: {problems}"
    state, old = turn.state, turn.state.plan
    _note_recovery(turn, plan, state.plans.moved_by(plan))
    turn.put(state.plans.issued(plan, state.step), state.inquiry.over())
    turn.do(Emit(plan.reason, plan.message, plan.reason == "Takeover"))
    before = grid_of(old) if old is not None and old.origin == plan.origin else None
    if state.spec.elastic and before != grid_of(plan):
        following.report_choice(turn, grid_of(plan))
    message = protocol.SendPlan(plan=plan)
    turn.do(*(Send(w, message) for w in plan.worker_ids()))


def _note_recovery(turn: Turn, plan: Plan, victims: list[tuple[Cell, WorkerId]]) -> None:
    """Record the cells that a plan moves; their new owners report when they have caught up."""
    state = turn.state
    lost = {v for _, v in victims if v in state.membership.gone}
    left = any(v in state.noticed for _, v in victims)
    moves = state.moves.without({c for c, v in victims if v in lost}, plan.epoch)
    if victims:
        first = min((state.liveness.first_signs.get(v, turn.now) for v in lost), default=turn.now)
        recovery = Recovery(
            epoch=plan.epoch,
            lost_at=first,
            decided_at=turn.now,
            step=state.step,
            notice=not lost,
            announced=bool(lost) or left,
            victims=tuple(victims),
        )
        moves = replace(moves, recoveries=(*moves.recoveries, recovery))
    turn.put(moves, replace(state.liveness, first_signs={}))


def _release(turn: Turn) -> None:
    """Tell workers under notice to exit once they hold no stage, need not write a checkpoint, and their log is not
    needed. While the job does not run, they exit at once: they may hold the quota for which their successors wait.
    """
    state = turn.state
    trains = state.phase == "Running"
    for worker in state.noticed:
        notice = state.membership.leaving[worker]
        needed = trains and (saving.is_writing(turn, worker) or worker in state.current_plan.holders())
        if state.workers[worker].released or needed:
            continue
        if not trains or (notice.free_since_step is not None and state.step >= notice.free_since_step + DRAIN_COMMITS):
            released = replace(state.workers[worker], released=True)
            turn.put(turn.state.workers.having(worker, released))
            stop = protocol.Stop(reason="Drained", message="no part is left; leave")
            turn.do(Send(worker, stop), RemoveWorker(worker))
        elif notice.free_since_step is None:
            free = replace(notice, free_since_step=state.step)
            turn.put(turn.state.membership.with_notice(worker, free))
