"""The status of a job for display, and the number of workers that the job wants, from the coordinator's state."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from bamboo_core.control.evaluations import best
from bamboo_core.coordinator.checkpointing import intervals
from bamboo_core.coordinator.events import (
    CheckpointSummary,
    CheckpointWrite,
    SlowWorker,
    Status,
    WorkerState,
    cell_name,
)
from bamboo_core.coordinator.grids import choosing, holding
from bamboo_core.coordinator.grids.holding import fewest_to_begin, to_have
from bamboo_core.coordinator.protection import counts_nodes
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.coordinator.stragglers import describe
from bamboo_core.coordinator.workers.membership import surplus_requests
from bamboo_core.job.budget_reach import done_by
from bamboo_core.job.spec import JobSpec, gives_back
from bamboo_core.planning.heirs import domains_of, level_counts
from bamboo_core.planning.plan import Cell, Plan, WorkerId
from bamboo_core.storage.url import shown_url


def status(state: CoordinatorState, now: float) -> Status:
    """Build the status of a job for views, metrics and summaries. now: seconds by the coordinator's clock."""
    seconds = state.usual_step
    last, stop = state.spec.training.known_steps, state.terms.early_stop
    losses = tuple(state.progress.losses[k] for k in sorted(state.progress.losses))
    plan = state.plan
    cells = _Cells.of(state, plan) if plan else _Cells()
    return Status(
        phase=state.phase,
        epoch=plan.epoch if plan else 0,
        step=state.step,
        steps=stop.wanted_steps if stop else last,
        stopped_early=stop.why if stop else "",
        grid_choice="; ".join(filter(None, (state.grids.announced, state.grids.unmet, state.holding.reason))),
        wanted=holding.to_have(state),
        ready=len(state.ready),
        first_loss=state.progress.first_loss,
        loss=losses[-1] if losses else None,
        losses=losses,
        lost_samples=sum(state.progress.lost_by_step.values()) * state.spec.training.micro_batch_size,
        step_seconds=seconds,
        samples_per_second=state.spec.training.global_batch_size / seconds if seconds else None,
        eta_seconds=(last - state.step) * seconds if seconds and last is not None else None,
        grid=_grid(plan, cells) if plan else (),
        workers=tuple((w, _part(state, w)) for w in state.workers),
        preemptions=state.membership.preemptions,
        notices=state.membership.notices,
        takeovers=state.moves.takeovers,
        replicating=tuple(cell_name(*cell) for cell in cells.replicating),
        replicas=cells.replicas,
        nodes=cells.nodes,
        crowded=_crowded(state),
        done_by=done_by(state.spec),
        mode=plan.mode if plan else None,
        lacks_room=plan is not None and choosing.lacks_room(state, plan),
        slow=_slow(state),
        digests=_digests(state),
        memory=tuple((w, record.memory) for w, record in state.workers.items() if record.memory),
        traffic=tuple((w, r.traffic.sent.in_each(r.traffic.steps)) for w, r in state.workers.items() if r.traffic),
        restarts=state.worker_ends.restarts,
        gradient_norm=state.progress.gradient_norm,
        learning_rate=state.progress.learning_rate,
        metrics=tuple(sorted(state.progress.metrics.items())),
        checkpoint=_checkpoint(state, now),
        skipped_steps=state.progress.skipped_steps,
        evaluations=tuple(state.progress.evaluations.items()),
        best_evaluation=best(wanted, state.progress.evaluations)
        if (wanted := state.spec.training.evaluation)
        else None,
        trained_without=state.progress.lost_microbatches * state.spec.training.micro_batch_size,
    )


def trained_samples(state: CoordinatorState) -> int:
    """Return the number of samples in the steps that this coordinator has counted, each once, without lost samples."""
    training = state.spec.training
    return (
        state.progress.trained * training.global_batch_size
        - state.progress.lost_microbatches * training.micro_batch_size
    )


def _checkpoint(state: CoordinatorState, now: float) -> CheckpointSummary | None:
    c = state.checkpoints
    if state.spec.checkpoint is None:
        return None
    began_with = (
        state.plan.restore if state.plan and state.restoring.looked and not state.plan.moved else None
    )  # else newer ones may exist
    newest = c.kept[0] if c.kept else began_with
    return CheckpointSummary(
        step=newest.step if newest else None,
        age=now - c.kept_at if c.kept_at is not None else None,
        seconds=c.seconds,
        bytes=c.bytes,
        place=shown_url(state.spec.checkpoint.storage),
        every_steps=intervals.interval(state, state.spec.checkpoint),
        first=c.first,
        writing=_write(state, now),
        counts=c.counts,
    )


def _write(state: CoordinatorState, now: float) -> CheckpointWrite | None:
    c = state.checkpoints
    if c.writing is None or state.plan is None:
        return None
    layers = state.plan.stages[-1][1]
    return CheckpointWrite(step=c.writing.step, seconds=now - c.since, written=len(c.parts), layers=layers)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The protection of the plan's cells (a stage of a pipeline each) against lost workers and nodes, by copies.
    unprotected: cells with a state in step on at most one worker (one node, if nodes may run several workers).
    replicating: unprotected cells whose replicas will protect them once in step. replicas: how many workers, whichever
    they are, can be lost without losing any cell's state. nodes: the number of nodes that hold the least spread cell in
    step. replicas, nodes: None without a plan.
    """

    unprotected: tuple[Cell, ...] = ()
    replicating: tuple[Cell, ...] = ()
    replicas: int | None = None
    nodes: int | None = None

    @classmethod
    def of(cls, state: CoordinatorState, plan: Plan) -> "_Cells":
        present, synced, nodes = state.workers.keys(), state.plans.synced, domains_of(plan)
        workers = {w: w for w in plan.holders()}
        by_worker, by_node = (level_counts(plan, synced, present, lost) for lost in (workers, nodes))
        together, counted = (nodes, by_node) if counts_nodes(state.spec) else (workers, by_worker)
        bare = tuple(cell for cell, count in counted.items() if count <= 1)
        return cls(
            unprotected=bare,
            replicating=tuple(c for c in bare if len({together[w] for w in present & {*plan.at(c).holders}}) > 1),
            replicas=max(0, min(by_worker.values()) - 1),
            nodes=min(by_node.values()),
        )


def _crowded(state: CoordinatorState) -> tuple[tuple[str, int], ...]:
    """Return the nodes with more workers than `spread.workersPerNode`, each with its number of workers.

    Empty if workersPerNode is 1: then workers are spread only as far as possible, and protection counts workers.
    """
    room = state.spec.spread.workers_per_node
    workers = Counter(record.peer.node for record in state.workers.values() if record.peer.node)
    return tuple(sorted((node, number) for node, number in workers.items() if number > room > 1))


def _slow(state: CoordinatorState) -> tuple[SlowWorker, ...]:
    plan = state.plan
    stragglers = (
        SlowWorker(
            worker=worker,
            pipeline=seen.cell.pipeline,
            stage=seen.cell.stage,
            seconds=seen.seconds,
            usual=seen.usual,
            sentence=describe(worker, seen),
        )
        for worker, seen in state.stragglers.slow.items()
        if seen.found and plan is not None and worker in state.workers and plan.owned_by(worker)
    )
    return tuple(sorted(stragglers, key=lambda one: one.usual / one.seconds))


def _grid(plan: Plan, cells: _Cells) -> tuple[tuple[tuple[WorkerId, bool], ...], ...]:
    bare = set(cells.unprotected)
    return tuple(
        tuple((a.owner, Cell(d, s) not in bare) for s, a in enumerate(row)) for d, row in enumerate(plan.pipelines)
    )


def _part(state: CoordinatorState, worker: WorkerId) -> WorkerState:
    if not state.stays(worker):
        return WorkerState.LEAVING
    if state.plan is None or not state.workers[worker].ready:
        return WorkerState.STARTING
    if state.plan.owned_by(worker):
        return WorkerState.TRAINING
    behind = any((cell, worker) not in state.plans.synced for cell in state.plan.replicated_by(worker))
    return WorkerState.SYNCING if behind else WorkerState.STANDBY


def _digests(state: CoordinatorState) -> tuple[str, ...]:
    plan = state.plan
    return tuple(digest for cell, digest in state.ending.finished if plan and cell.pipeline == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """The number of workers that a job's coordinator wants, and the workers that it has given up.

    number: wanted workers, including standbys. fewest: the fewest with which the job can begin (`fewest_to_begin`).
    chosen: `holding.target` may limit `number`. requested: how many requested workers have not joined. surplus: how
    many of these are no longer wanted. gone: workers lost, refused or dismissed, for good. stopped: workers that are
    gone or were asked to leave. misfit: the worker refused last for its platform or data, and why. begun: a plan of the
    job is known. recovering: a restarted coordinator waits for its workers.
    """

    spec: JobSpec
    number: int
    fewest: int
    chosen: bool
    requested: int
    surplus: int
    gone: Collection[WorkerId]
    stopped: Collection[WorkerId]
    misfit: tuple[WorkerId, str] | None
    begun: bool
    recovering: bool


def wanted_workers(state: CoordinatorState) -> WantedWorkers:
    return WantedWorkers(
        spec=state.spec,
        number=to_have(state),
        fewest=fewest_to_begin(state),
        chosen=gives_back(state.spec) and state.holding.target is not None,
        requested=state.membership.requested,
        surplus=surplus_requests(state),
        gone=state.membership.gone,
        stopped=state.membership.gone.union(w for w in state.noticed if state.workers[w].released),
        misfit=state.admission.misfit,
        begun=state.plan is not None,
        recovering=state.phase == "Recovering",
    )
