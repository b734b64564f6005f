"""Invariants during and after a simulated run, and a report of what each worker waits for when a run hangs."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bamboo_core.control.digests import add_digests
from bamboo_core.control.protocol import Evaluated, StepCommitted
from bamboo_core.coordinator.events import Outcome, Takeover
from bamboo_core.planning.plan import Cell, Plan, plan_problems
from bamboo_trainer.commit.commit_log import KEPT_STEPS
from sim_arithmetic import Oracle
from sim_history import kept_by, missing_of
from sim_holders import holders, usable
from sim_many import RunResult
from sim_stage import Violation

if TYPE_CHECKING:
    from sim_job import Simulation
    from sim_worker import Node

LOGGED_STEPS = 2


class Checks:
    """Invariants over the whole job; a broken one raises Violation."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.commits: dict[tuple[int, int], dict[str, Any]] = {}  # origin and step, worker
        self.newest: dict[str, tuple[int, int]] = {}
        self.plans: dict[int, Plan] = {}
        self.epoch = 0

    def planned(self, plan: Plan) -> None:
        if problems := plan_problems(plan):
            raise Violation(f"plan {plan.epoch} is unsound: {problems}")
        if self.plans.setdefault(plan.epoch, plan) != plan:
            raise Violation(f"two different plans of epoch {plan.epoch}")
        if plan.epoch not in (self.epoch, self.epoch + 1) and self.epoch:
            raise Violation(f"epoch {plan.epoch} follows {self.epoch}")
        self.epoch = plan.epoch

    def taken_over(self, taken: Takeover) -> None:
        """Check that a worker that reports a takeover owns the cell in the plan that its report names."""
        heir = self.plans[taken.epoch].at(Cell(taken.pipeline, taken.stage)).owner
        if heir != taken.worker:
            raise Violation(f"{taken.worker} reports a takeover that plan {taken.epoch} left to {heir}: {taken}")

    def forget_plans(self) -> None:
        """Forget all plans, since another coordinator may not know the newest epochs."""
        self.epoch = 0
        self.plans.clear()

    def one_plan(self, nodes: Iterable["Node"]) -> None:
        """Check that no two of these workers obey different plans of the same epoch."""
        plans: dict[int, Plan] = {}
        for plan in [n.engine.components.plan.current for n in nodes if n.engine and n.engine.components]:
            if plans.setdefault(plan.epoch, plan) != plan:
                raise Violation(f"two different plans of epoch {plan.epoch} are obeyed")

    def agreed(self, node: "Node", living: Callable[[str], bool]) -> None:
        """Check that a living worker knows the same commit of each step as the other living workers of the job."""
        parts = node.engine.components if node.engine else None
        if parts is None:
            return
        log, origin = parts.committer.log, parts.plan.current.origin
        if self.newest.get(node.name) == (origin, log.newest):
            return
        self.newest[node.name] = (origin, log.newest)
        for step, commit in log.commits.items():
            known = self.commits.setdefault((origin, step), {})
            known[node.name] = commit
            unlike = (w for w, c in known.items() if c != commit and str(c) != str(commit))  # NaN is NaN
            other = next(filter(living, unlike), None)
            if other and living(node.name):
                raise Violation(f"step {step} has two commits: {commit} at {node.name}, {known[other]} at {other}")

    def committed(self, worker: str, said: StepCommitted) -> None:
        skipped = said.step in self.oracle.arithmetic.skipped
        if said.skipped != skipped:
            raise Violation(f"step {said.step} is {'not ' * skipped}skipped")
        expected = (None if skipped else self.oracle.losses[said.step], self.oracle.norms[said.step])
        if said.microbatches == self.oracle.arithmetic.microbatches and (said.loss, said.gradient_norm) != expected:
            raise Violation(f"step {said.step} has loss and norm {said.loss, said.gradient_norm}, not {expected}")
        a = self.oracle.arithmetic
        mean = sum(m * a.weight(m) for m in range(a.microbatches)) / a.whole
        if said.metrics != {"added": self.oracle.added[said.step], "microbatch": mean}:
            raise Violation(f"step {said.step} has the metrics {said.metrics}")
        if said.learning_rate not in (None, 1 / (1 + said.step)):  # a new root's state may be on its way
            raise Violation(f"step {said.step} has the learning rate {said.learning_rate}")
        if said.microbatches != self.oracle.arithmetic.microbatches:
            raise Violation(f"the loss of step {said.step} is of {said.microbatches} microbatches only")

    def evaluated(self, said: Evaluated) -> None:
        for step, metrics in said.states.items():
            if (metrics or None) != (expected := self.oracle.evaluation(step)):
                raise Violation(f"the state after step {step} has the metrics {metrics}, not {expected}")

    def told(self, node: "Node") -> None:
        """Check that a worker that has taken over a cell reports this by the time it has finished the step."""
        parts = node.engine.components if node.engine else None
        for run in parts.executor.cells.values() if parts else ():
            if run.program and run.next is None and run.takeover:
                raise Violation(f"{node.name} has taken over {run.cell}, finished step {run.step}, and not said so")

    def followed(self, node: "Node") -> None:
        """Check that a worker with a step's gradients knows the previous commit, without which it cannot use them."""
        parts = node.engine.components if node.engine else None
        for stage, state in parts.states.by_stage.items() if parts else ():
            lacked = parts is not None and state.version not in parts.committer.log.commits
            if state.stage and lacked and state.version + 1 in state.final:
                raise Violation(f"{node.name} has gradients for stage {stage}, not the commit of {state.version}")

    def settled(self, nodes: Sequence["Node"], steps: int) -> None:
        """Check, once a job is complete and quiet, that replicas hold the last state and that owners know this."""
        engines = {n.name: n.engine.components for n in nodes if n.alive and not n.frozen and n.engine}
        owners = {name: parts for name, parts in engines.items() if parts}
        for name, owner in owners.items():
            for (cell, worker), known in owner.replicator.progress.items():
                replica = owners.get(worker)
                if replica is None or replica.plan.current != owner.plan.current:
                    continue
                if replica.plan.pending or owner.plan.pending:
                    continue
                plan = replica.plan.current
                if any(plan.at(c).owner not in owners for c in plan.replicated_by(worker)):
                    continue  # lost as the job ended: a replica takes a step for all that it keeps, or for none
                state = replica.states.by_stage[cell.stage]
                if state.version != steps or not known.synced:
                    raise Violation(
                        f"all is quiet, and {worker} holds version {state.version} of stage {cell.stage}, not {steps}: "
                        f"{known}; it knows commits {sorted(replica.committer.log.commits)} and has gradients of "
                        f"{sorted(state.final)}; its owner is {name}"
                    )

    def bounded(self, node: "Node") -> None:
        parts = node.engine.components if node.engine else None
        if parts is None:
            return
        if len(parts.committer.log.commits) > KEPT_STEPS + 1 and not parts.states.by_stage:
            raise Violation(f"{node.name}, which holds nothing, keeps {len(parts.committer.log.commits)} commits")
        steps = {frame.address.step for frame in parts.outbox.log.frames()}
        if steps and max(steps) - min(steps) >= LOGGED_STEPS:
            raise Violation(f"the log of {node.name} holds steps {sorted(steps)}")


def judge(job: "Simulation") -> RunResult:
    """Return the result of a run that has ended, with its problem if a rule is broken."""
    finish = job.finish
    kind = str(finish.outcome) if finish else "None"
    problem = job.failure
    if not problem and finish:
        if finish.outcome is Outcome.COMPLETE:
            problem = _wrong_result(job)
        elif finish.outcome is Outcome.UNRECOVERABLE:
            problem = _avoidable(job)
        else:
            problem = f"the job ended: {finish.reason}: {finish.message}"
    if problem and finish and finish.outcome is Outcome.UNRECOVERABLE:
        kind = "Avoidable"
    return RunResult(
        seed=job.scenario.seed, kind=kind, problem=problem, struck=len(job.injector.struck), seconds=job.clock.now
    )


def _wrong_result(job: "Simulation") -> str | None:
    if job.state.guard.differences:
        return "equal results are found to differ"
    plan = job.state.plan
    assert plan is not None
    digests = [add_digests(job.oracle.digests[first:end]) for first, end in plan.stages]
    for cell, digest in job.state.ending.finished:
        if digest != digests[cell.stage]:
            return f"cell {tuple(cell)} ended with {digest}, not {digests[cell.stage]}"
    if _spared(job) and (restores := job.state.checkpoints.counts.restores):
        return f"went back to a checkpoint, though every fault left copies: {restores}"
    losses = [job.state.progress.losses.get(step) for step in range(job.scenario.arithmetic.steps)]
    if any(got not in (want, None) for got, want in zip(losses, job.oracle.losses, strict=True)):
        return f"the losses are {losses}, not {job.oracle.losses}"
    wanted = {v: job.oracle.evaluation(v) for v in range(job.scenario.arithmetic.steps + 1)}
    due = {v: metrics for v, metrics in wanted.items() if metrics}
    known = dict(job.state.progress.evaluations)
    if known != due and (not job.injector.restarted or any(known.get(v) != due[v] for v in list(due)[-1:])):
        return f"evaluated were {known}, not {due}"
    c = job.state.checkpoints
    if (job.scenario.checkpoints or job.scenario.saving) and not c.final_failures:
        begun = [job.state.plan.restore.step] if job.state.plan and job.state.plan.restore else []
        if job.scenario.arithmetic.steps not in [*(one.step for one in job.store.committed), *begun]:
            return f"the last state is in none of the checkpoints {job.store.committed}"
    if job.history is not None:
        skipped, steps = job.oracle.arithmetic.skipped, job.scenario.arithmetic.steps
        missing = missing_of(job.history, steps)
        if missing and not (job.injector.restarted or job.state.checkpoints.counts.restores):
            return f"the steps {sorted(missing)} are not in the history, and no step was lost"
        losses = [None if n in skipped else job.oracle.losses[n] for n in range(steps)]
        due = [[n, loss] for n, loss in enumerate(losses, 1) if n not in missing]
        *called, end = kept_by(job.history, "steps").state
        if [one[1:] for one in called] != due or end != steps:
            return f"the callback was told {called} and {end}, not {due} and the end"
    return None


def _spared(job: "Simulation") -> bool:
    """Return whether the scenario made every fault leave copies of all state that it took.

    Without redundancy, or on a grid of one cell, the first plan has no copies; a coordinator that restarted may have
    lost track of them.
    """
    wanted, a = job.scenario, job.scenario.arithmetic
    return wanted.care == 2 and wanted.mode != "None" and a.stages * a.pipelines > 1 and not job.injector.restarted


def _avoidable(job: "Simulation") -> str | None:
    """Return the problem of an unrecoverable job that could go on from a checkpoint or workers' states; else None."""
    usable_checkpoints = [one for one in job.store.committed if one not in job.store.damaged]
    if usable_checkpoints and job.scenario.checkpoints:
        return f"Unrecoverable, though there are the checkpoints {usable_checkpoints}: {job.finish}"
    commit, gone = job.commit, job.state.membership.gone
    layers = range(job.scenario.arithmetic.layers)
    living = {layer: holders(job.nodes.values(), gone, layer, commit) for layer in layers}
    if _spared(job):
        return f"Unrecoverable, though every fault left copies of all it took: {job.finish}"
    if any(not names for names in living.values()):
        return None
    frozen = [n.name for n in job.nodes.values() if n.frozen]
    return f"Unrecoverable, though every layer is still held: {living} (frozen: {frozen}): {job.finish}"


# the report of a hang


def waiting(job: "Simulation") -> str:
    state, plan = job.state, job.state.plan
    lines = [
        f"phase {state.phase}, step {state.step}, epoch {plan.epoch if plan else 0}, workers {list(state.workers)}, "
        f"requested {state.membership.requested}, "
        f"not applied {sorted(plan.worker_ids() - state.plans.applied) if plan else []}, "
        f"synced {sorted((tuple(c), w) for c, w in state.plans.synced)}, links {state.liveness.links}"
    ]
    if plan:
        from sim_job import describe

        lines.append(describe(plan))
    lines += [_node(job, node) for node in job.nodes.values() if node.alive]
    return "\n    ".join(lines)


def _node(job: "Simulation", node: "Node") -> str:
    parts = node.engine.components if node.engine else None
    flags = f"{'frozen ' * node.frozen}{'' if node.channel.open else 'no channel '}"
    if parts is None:
        return f"{node.name}: {flags}no plan"
    held = {
        s: f"v{h.version}{'o' * h.owned}{'u' * (not usable(node, s, job.commit))}+{sorted(h.final)}"
        for s, h in parts.states.by_stage.items()
    }
    plan, pending = parts.plan.current, parts.plan.pending
    told = [
        f"{node.name}: {flags}epoch {plan.epoch}, pending {pending.epoch if pending else 0},"
        f" outdated {parts.plan.is_outdated}, newest {parts.committer.log.newest}, held {held}"
    ]
    if parts.committer.awaited_reports:
        told.append(f"awaits reports of {sorted(parts.committer.awaited_reports)}")
    told += [f"{tuple(run.cell)} step {run.step} {run.next}" for run in parts.executor.cells.values()]
    told.append(f"waits for {parts.executor.waits_for()}")
    progress = parts.replicator.progress.items()
    told += [f"{tuple(c)}->{w} {known}" for (c, w), known in progress if not known.synced or known.acked < 0]
    return "; ".join(told)
