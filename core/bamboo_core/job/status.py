"""What a BambooJob's status says: the types from which the CRD's schema is made and as which the command line reads it.

The operator writes it (`bamboo_operator.status.document`). The text below a field is its description. Reading is
lenient, as another version may have written it: bounds are only in the schema, and what is absent has a default.
"""

from datetime import datetime
from typing import Annotated, Any

import msgspec

from bamboo_core.job.fields import MAX_INT


def _schema(**keywords: Any) -> msgspec.Meta:
    """What the CRD says of a field beside its type."""
    return msgspec.Meta(extra_json_schema=keywords)


Time = Annotated[datetime, msgspec.Meta(tz=True)]
Count = Annotated[int, _schema(format="int32", minimum=0, maximum=MAX_INT)]
BigCount = Annotated[int, _schema(format="int64", minimum=0)]
NotNegative = Annotated[float, _schema(minimum=0)]
Amount = Annotated[str, _schema(maxLength=32, pattern=r"^[0-9]+(\.[0-9]+)?$")]  # of money
Sentence = Annotated[str, _schema(maxLength=1024)]
WorkerName = Annotated[str, _schema(maxLength=253)]
Value = Annotated[float | None, _schema(description="Its value.")]
Metrics = Annotated[dict[str, Value], _schema(maxProperties=64)]
_ATOMIC = {"x-kubernetes-list-type": "atomic"}
_BY_TYPE = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class StatusPart(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object of the status. Attributes are the API's fields in snake_case."""


class ReportedCondition(StatusPart, frozen=True):
    """One condition."""

    type: Annotated[str, _schema(maxLength=63, pattern=r"^[A-Z][A-Za-z]*$")]
    """The name of the condition."""
    status: Annotated[str, _schema(enum=["True", "False", "Unknown"])]
    """Whether it holds."""
    observed_generation: BigCount = 0
    """The generation of the spec that the condition is about."""
    last_transition_time: Time | None = None
    """When the status last changed."""
    reason: Annotated[str, _schema(minLength=1, maxLength=253, pattern=r"^[A-Z][A-Za-z0-9]*$")] = ""
    """Why, in one CamelCase word for programs."""
    message: Annotated[str, _schema(maxLength=32768)] = ""
    """Why, in a sentence for people."""


_REQUIRED = ["type", "status", "lastTransitionTime", "reason", "message"]  # of what is written
Condition = Annotated[ReportedCondition, _schema(required=_REQUIRED, description="One condition.")]


class RolloutStatus(StatusPart, frozen=True):
    """How many workers' pods are as they would be made now, and how the others are replaced."""

    revision: Annotated[str, _schema(maxLength=63)] = ""
    """A digest of what new workers' pods are made of; their label bamboo.dev/worker-revision has it."""
    state: Annotated[str, _schema(enum=["Complete", "Progressing", "Paused", "Stalled"])] = ""
    """Whether workers are being replaced."""
    updated: Count = 0
    """How many of the workers are ready and of that revision."""
    total: Count = 0
    """How many there should be."""
    start_time: Time | None = None
    """When it began, or began again after a pause."""
    message: Annotated[str, _schema(maxLength=1000)] = ""
    """Why it is stalled."""


class PipelineCounts(StatusPart, frozen=True):
    """Counts of pipelines."""

    desired: Count = 0
    """How many there should be now."""
    ready: Count = 0
    """How many train."""
    degraded: Count = 0
    """How many of those lack a worker or a copy of a stage."""


class WorkerCounts(StatusPart, frozen=True):
    """Counts of workers."""

    desired: Count = 0
    """How many there should be now, including spare workers."""
    ready: Count = 0
    """How many have loaded their task."""
    standby: Count = 0
    """How many of those are spare."""
    spot: Count = 0
    """How many run in pools of capacity Spot."""
    on_demand: Count = 0
    """How many run in pools of capacity OnDemand."""


class TakeoverStatus(StatusPart, frozen=True):
    """The latest takeover."""

    time: Annotated[str, _schema(format="date-time")] = ""
    """When it ended."""
    victim: WorkerName = ""
    """The worker that was lost or has left."""
    worker: WorkerName = ""
    """The worker that runs the stage now."""
    pipeline: Annotated[int, _schema(format="int32", minimum=0, maximum=1023)] = 0
    """The pipeline of the stage, counted from 0."""
    stage: Annotated[int, _schema(format="int32", minimum=0, maximum=1023)] = 0
    """The stage, counted from 0."""
    pause_seconds: NotNegative = 0.0
    """How long the stage stood still."""


class EvaluationStatus(StatusPart, frozen=True):
    """The newest evaluation, and the best one."""

    step: Count = 0
    """After which step it was made."""
    metrics: Metrics = {}
    """The loss, and the task's metrics; none that is not finite."""
    best_step: Count | None = None
    """After which step the best state was measured (spec.training.evaluation.metric)."""
    best_metrics: Metrics = {}
    """What was measured of the best state."""


class TrainingProgress(StatusPart, frozen=True):
    """Progress."""

    step: Count = 0
    """Steps committed."""
    steps: Count = 0
    """Steps that are wanted. Fewer are done if stoppedEarly says why."""
    stopped_early: Sentence = ""
    """Why the job ends before the last of these."""
    grid_choice: Sentence = ""
    """Which grid was chosen last, and what was expected of it and of others (spec.elastic.objective)."""
    done_by: Sentence = ""
    """Whether the last step will be done by spec.budget.doneBy at the present rate, and if not, how late it will be."""
    evaluation: EvaluationStatus | None = None
    """The newest evaluation, and the best one."""
    samples_per_second: NotNegative | None = None
    """By the median duration of recent steps."""
    loss: float | None = None
    """The loss of the last committed step."""
    eta_seconds: BigCount | None = None
    """Estimated seconds until the job is complete, at the current speed."""
    progress_percentage: Annotated[int, _schema(format="int32", minimum=0, maximum=100)] = 0
    """Committed steps as a percentage of all."""
    last_reported_time: Time | None = None
    """When this progress was reported."""


class CheckpointStatus(StatusPart, frozen=True):
    """The newest complete checkpoint."""

    last_step: Count | None = None
    """Steps committed when it was taken."""
    last_time: Time | None = None
    """When it was complete."""


class JobCost(StatusPart, frozen=True):
    """What the workers' nodes cost, by the prices of the node pools and in their currency."""

    per_hour: Amount | None = None
    """The cost per hour of the current workers, a decimal number."""
    total: Amount | None = None
    """The cost so far, a decimal number."""
    budget: Sentence | None = None
    """How much of spec.budget.money is spent, and how far the rest is expected to get."""
    repeated: Amount | None = None
    """What of it repeated steps cost, a decimal number."""
    on_demand_total: Amount | None = None
    """What the same workers would have cost since comparedSince at the price of the first pool of capacity OnDemand
    that has one; absent if none has.
    """
    saved: Annotated[str, _schema(maxLength=32, pattern=r"^-?[0-9]+(\.[0-9]+)?$")] | None = None
    """The savings since comparedSince, onDemandTotal less the real cost; below 0 if that is higher."""
    compared_since: Time | None = None
    """The time since when onDemandTotal and saved are counted."""
    counted_until: Time | None = None
    """The time until which the cost is counted; pods that go while no operator is active are not in it."""


class BambooJobStatus(StatusPart, frozen=True):
    """The state of the job. The operator writes it, at most once in 15 seconds while only progress changes."""

    observed_generation: BigCount = 0
    """The generation of the spec that the status is about."""
    conditions: Annotated[tuple[Condition, ...], _schema(maxItems=16, **_BY_TYPE)] = ()
    """Accepted, WorkersReady, WorkersUpdated, Running, Degraded, Protected, Straggling, Corrupted, BudgetShort,
    Suspended, Restoring, FallbackActive, Complete, Failed: whether each holds, since when, and why.
    """
    state: Annotated[str, _schema(maxLength=63)] = "Pending"
    """The conditions in one word, such as Running or Degraded. For display only; programs read the conditions."""
    start_time: Time | None = None
    """When the operator first ran the job."""
    completion_time: Time | None = None
    """When the job ended, completed or failed."""
    epoch: BigCount = 0
    """The number of the current plan. It grows whenever the assignment of workers changes."""
    rollout: RolloutStatus | None = None
    """How many workers' pods are as they would be made now, and how the others are replaced."""
    pipelines: PipelineCounts = PipelineCounts()
    """Counts of pipelines."""
    workers: WorkerCounts = WorkerCounts()
    """Counts of workers."""
    workers_created: Count = 0
    """How many workers the job has had so far."""
    preemptions: Count = 0
    """Workers lost, or given notice. Those that failed are counted in restarts, too."""
    takeovers: Count = 0
    """Stages that another worker has taken over."""
    restores: Count = 0
    """Times that the job went back to a checkpoint."""
    repeated_steps: Count = 0
    """Committed steps that were repeated as the job went back to a checkpoint."""
    restarts: Count = 0
    """Failures that counted towards backoffLimit."""
    last_takeover: TakeoverStatus | None = None
    """The latest takeover."""
    training: TrainingProgress = TrainingProgress()
    """Progress."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """The newest complete checkpoint."""
    cost: JobCost = JobCost()
    """What the workers' nodes cost, by the prices of the node pools and in their currency."""
    budget_warnings: Annotated[
        tuple[Annotated[str, _schema(maxLength=64, description="A reason, and what it is about.")], ...],
        _schema(maxItems=8, **_ATOMIC),
    ] = ()
    """Of what of spec.budget the user was warned by an event: a reason of the condition BudgetShort and the money or
    the date.
    """
    digests: Annotated[
        tuple[
            Annotated[str, _schema(maxLength=64, description="The digest of one stage, in the order of stages.")], ...
        ],
        _schema(maxItems=1024, **_ATOMIC),
    ] = ()
    """The sha256 of each stage's final parameters and optimizer state, once the job is complete."""
    plan: Annotated[str, _schema(maxLength=262144)] = ""
    """The assignment of workers as JSON: {"epoch": ..., "pipelines": [[worker of stage 0, ...], ...]}."""
    selector: Annotated[str, _schema(maxLength=16384)] = ""
    """A label selector for autoscalers, of one worker's pod of each ready pipeline. All of the job's pods have the
    label bamboo.dev/job-uid.
    """
