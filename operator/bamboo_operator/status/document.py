"""A BambooJob's status in the shape of the API, built from the coordinator's status and the operator's facts."""

from collections.abc import Mapping
from decimal import Decimal

from msgspec.structs import replace

from bamboo_core.coordinator.events import Status
from bamboo_core.job.spec import gives_back, most_pipelines, wanted_workers
from bamboo_core.job.status import (
    BambooJobStatus,
    CheckpointStatus,
    JobCost,
    PipelineCounts,
    ReportedCondition,
    TrainingProgress,
    WorkerCounts,
)
from bamboo_core.view.job_view import run_status
from bamboo_operator.status.condition_rules import (
    LONGEST_MESSAGE,
    ConditionResult,
    RuleInput,
    condition_results,
    displayed_state,
    evaluate,
)
from bamboo_operator.status.facts import StatusFacts

PROGRESS_SECONDS = 15.0
NOTHING = TrainingProgress()
_CENTS = Decimal("0.0001")


def job_status(status: Status | None, previous: BambooJobStatus, facts: StatusFacts) -> BambooJobStatus:
    """Return the status to write, without start_time and workers_created, which `StatusWriter` adds. Unknown fields
    keep their previous values. Applied to its own result, the function changes nothing.
    status: the coordinator's; None without one. previous: the last written status.
    """
    known = None if status and status.phase == "Recovering" else status  # then it knows no plan and no worker yet
    held = previous.workers.desired if facts.spec and gives_back(facts.spec) else None
    given = RuleInput(known, facts, condition_results(previous.conditions), held or None)
    results = evaluate(given)
    conditions = _conditions(results, previous, facts)
    run = run_status(status, facts.now) if status else BambooJobStatus()
    earlier = facts.earlier
    return BambooJobStatus(
        observed_generation=facts.generation,
        conditions=conditions,
        state=displayed_state(results),
        pipelines=_pipelines(given, previous),
        workers=_workers(given, previous),
        preemptions=max(previous.preemptions, earlier.preemptions + run.preemptions),
        takeovers=max(previous.takeovers, earlier.takeovers + run.takeovers),
        restores=max(previous.restores, earlier.restores + run.restores),
        restarts=max(previous.restarts, earlier.restarts + run.restarts),
        training=_training(run, previous),
        checkpoint=_checkpoint(run, previous),
        cost=_cost(given),
        digests=run.digests or previous.digests,
        plan=_plan(status, previous, facts),
    )


def _plan(status: Status | None, previous: BambooJobStatus, facts: StatusFacts) -> str | None:
    """Return the plan record to keep; None once a suspended job's training has ended."""
    if facts.suspended and (status is None or facts.finish is not None):
        return None
    return facts.plan or previous.plan


def worth_writing(new: BambooJobStatus, old: BambooJobStatus, seconds_since_last: float) -> bool:
    """Return whether to write a status: a change at once, but only progress or total cost after PROGRESS_SECONDS."""
    if new == old:
        return False
    return seconds_since_last >= PROGRESS_SECONDS or _lasting(new) != _lasting(old)


def _lasting(status: BambooJobStatus) -> BambooJobStatus:
    training = TrainingProgress(steps=status.training.steps)
    return replace(status, training=training, cost=JobCost(per_hour=status.cost.per_hour))


def _conditions(
    results: Mapping[str, ConditionResult], previous: BambooJobStatus, facts: StatusFacts
) -> tuple[ReportedCondition, ...]:
    old = {c.type: c for c in previous.conditions}
    mine = []
    for kind, result in results.items():
        status, before = str(result.holds), old.get(kind)
        kept = before.last_transition_time if before and before.status == status else None
        mine.append(
            ReportedCondition(
                type=kind,
                status=status,
                last_transition_time=kept or facts.time,
                reason=result.reason,
                message=result.message[:LONGEST_MESSAGE],
            )
        )
    return (*mine, *(c for kind, c in old.items() if kind not in results))


def _pipelines(given: RuleInput, previous: BambooJobStatus) -> PipelineCounts:
    spec, status = given.facts.spec, given.status
    if given.idle or spec is None:
        return PipelineCounts()
    desired = _desired_pipelines(given, previous)
    if status is None:
        return replace(previous.pipelines, desired=desired)
    stages = len(status.grid[0]) if status.grid else 0
    return PipelineCounts(stages=stages, desired=desired, ready=len(status.grid))


def _desired_pipelines(given: RuleInput, previous: BambooJobStatus) -> int:
    """Return the fixed number of pipelines, else the grid's (without a status, the last written), else the maximum."""
    spec, status = given.facts.spec, given.status
    assert spec is not None
    if not spec.topology.chooses_pipelines:
        return spec.topology.pipelines
    if status is None:
        return previous.pipelines.desired or most_pipelines(spec)
    return len(status.grid) or most_pipelines(spec)


def _workers(given: RuleInput, previous: BambooJobStatus) -> WorkerCounts:
    spec, status = given.facts.spec, given.status
    idle = given.idle or spec is None
    known = WorkerCounts(
        desired=0 if idle or not spec else status.wanted if status else given.desired or wanted_workers(spec),
    )
    if idle:
        return known
    if status is None:
        return replace(known, ready=previous.workers.ready)
    return replace(known, ready=given.ready())


def _checkpoint(run: BambooJobStatus, previous: BambooJobStatus) -> CheckpointStatus:
    """Return the newest known checkpoint: the written one, with its time, unless the coordinator's is of another step.

    A coordinator that knows no checkpoint may not have looked for one yet.
    """
    known, before = run.checkpoint, previous.checkpoint
    return before if known.last_step in (None, before.last_step) else known


def _training(run: BambooJobStatus, previous: BambooJobStatus) -> TrainingProgress:
    """Return the job's progress; the last written values where the coordinator does not know them yet."""
    before, now = previous.training, run.training
    if now == NOTHING or (before != NOTHING and now.step == 0 and now.loss is None):
        return before
    evaluation, reported = now.evaluation or before.evaluation, before.last_reported_time
    now = replace(now, evaluation=evaluation)
    return before if reported and replace(now, last_reported_time=reported) == before else now


def _cost(given: RuleInput) -> JobCost:
    facts = given.facts
    per_hour = given.per_hour()
    total = facts.cost
    if per_hour is None and not total:
        return JobCost()
    return JobCost(
        per_hour=None if per_hour is None else f"{per_hour or Decimal(0):f}",
        total=f"{total.quantize(_CENTS):f}",
        counted_until=facts.counted_until,
    )
