"""A BambooJob's status: the types that the operator writes and everyone reads, and the source of the CRD's schema.

The text below a field is its description. Only the schema checks bounds; `read_status` does not. A field that is not
always written is None while absent.
"""

from typing import Annotated, Any

import msgspec

from bamboo_core.job.api_object import ApiPart, Time, read_api_part
from bamboo_core.job.fields import MAX_INT

EARLY_STOPPED = "EarlyStopped"  # the reason of a job that is complete before its last step


def _schema(**keywords: Any) -> msgspec.Meta:
    """Return an annotation that adds these keywords to a field's schema in the CRD."""
    return msgspec.Meta(extra_json_schema=keywords)


Count = Annotated[int, _schema(format="int32", minimum=0, maximum=MAX_INT)]
BigCount = Annotated[int, _schema(format="int64", minimum=0)]
NotNegative = Annotated[float, _schema(minimum=0)]
Amount = Annotated[str, _schema(maxLength=32, pattern=r"^[0-9]+(\.[0-9]+)?$")]  # of money
Value = Annotated[float | None, _schema(description="Its value.")]
Metrics = Annotated[dict[str, Value], _schema(maxProperties=64)]
_ATOMIC = {"x-kubernetes-list-type": "atomic"}
_BY_TYPE = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class ReportedCondition(ApiPart, frozen=True):
    """A condition of the job: whether it holds, since when, and why."""

    type: Annotated[str, _schema(maxLength=63, pattern=r"^[A-Z][A-Za-z]*$")]
    """The name of the condition."""
    status: Annotated[str, _schema(enum=["True", "False", "Unknown"])]
    """Whether it holds."""
    last_transition_time: Time | None = None
    """When the status last changed."""
    reason: Annotated[str, _schema(minLength=1, maxLength=253, pattern=r"^[A-Z][A-Za-z0-9]*$")] = ""
    """Why, in one CamelCase word for programs."""
    message: Annotated[str, _schema(maxLength=32768)] = ""
    """Why, in a sentence for people."""

    @property
    def holds(self) -> bool:
        return self.status == "True"


_REQUIRED = ["type", "status", "lastTransitionTime", "reason", "message"]  # in every written condition
Condition = Annotated[ReportedCondition, _schema(required=_REQUIRED, description="One condition.")]


class PipelineCounts(ApiPart, frozen=True):
    """Counts of the job's pipelines, desired and ready, and of the stages in each."""

    stages: Count = 0
    """The number of stages in each pipeline."""
    desired: Count = 0
    """How many pipelines there should be now."""
    ready: Count = 0
    """How many pipelines train."""


class WorkerCounts(ApiPart, frozen=True):
    """Counts of the job's workers, desired and ready."""

    desired: Count = 0
    """How many workers there should be now, including spare ones."""
    ready: Count = 0
    """How many workers have loaded their task."""


class EvaluationStatus(ApiPart, frozen=True):
    """The newest evaluation."""

    step: Count = 0
    """The step after which it was made."""
    metrics: Metrics = msgspec.field(default_factory=dict)
    """The loss and the task's metrics, without values that are not finite."""


class TrainingProgress(ApiPart, frozen=True):
    """The progress of the training."""

    step: Count | None = None
    """Steps committed."""
    steps: Count | None = None
    """Steps to train. Fewer are done if an evaluation or a decision of the task ends the job early."""
    evaluation: EvaluationStatus | None = None
    """The newest evaluation."""
    samples_per_second: NotNegative | None = None
    """Samples trained per second, by the median duration of recent steps."""
    loss: float | None = None
    """The loss of the last committed step."""
    eta_seconds: BigCount | None = None
    """Estimated seconds until the job is complete, at the current speed."""
    last_reported_time: Time | None = None
    """When this progress was reported."""


class CheckpointStatus(ApiPart, frozen=True):
    """The newest complete checkpoint."""

    last_step: Count | None = None
    """The number of committed steps when it was taken."""
    last_time: Time | None = None
    """When it was complete."""


class JobCost(ApiPart, frozen=True):
    """The cost of the workers' nodes, by the prices of the node pools and in their currency."""

    per_hour: Amount | None = None
    """The cost per hour of the current workers, a decimal number."""
    total: Amount | None = None
    """The cost so far, a decimal number."""
    counted_until: Time | None = None
    """The time up to which the cost is counted. Pods that go while no operator is active are not counted."""


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan as saved in the job's status, from which a restarted operator continues.

    Before the first plan only `lost` is set. pipelines: the owner of each stage, by pipeline. lost: workers that are
    gone for good, or that were asked to leave and neither own nor replicate a cell; None if the record is absent,
    unreadable or of a local run. counted: workers that the next operator must not count as preempted, because their
    notice is counted already, or because they own or replicate a cell and were asked to leave. Both name only workers
    whose pods still exist. task: digest of the task, which must not have changed.
    """

    epoch: int = 0
    pipelines: tuple[tuple[str, ...], ...] = ()
    lost: frozenset[str] | None = None
    counted: frozenset[str] | None = None
    task: str | None = None

    def written(self) -> str:
        return msgspec.json.encode(self, order="deterministic").decode()


class BambooJobStatus(ApiPart, frozen=True):
    """The state of the job. The operator writes it, at most once in 15 seconds while only progress changes."""

    observed_generation: BigCount = 0
    """The generation of the spec that the status is about."""
    conditions: Annotated[tuple[Condition, ...], _schema(maxItems=16, **_BY_TYPE)] = ()
    """Accepted, WorkersReady, WorkersUpdated, Running, Degraded, Protected, Straggling, BudgetShort,
    Suspended, Restoring, FallbackActive, Complete, Failed: whether each holds, since when, and why.
    """
    state: Annotated[str, _schema(maxLength=63)] = "Pending"
    """The conditions in one word, such as Running or Degraded. For display only; programs read the conditions."""
    start_time: Time | None = None
    """When the operator first ran the job."""
    pipelines: PipelineCounts = PipelineCounts()
    """How many pipelines the job should have, how many train, and the number of stages in each."""
    workers: WorkerCounts = WorkerCounts()
    """How many workers the job should have, and how many are ready."""
    workers_created: Count | None = None
    """How many workers the job has had so far."""
    preemptions: Count = 0
    """Workers lost, or given a notice. Failed workers are also counted in restarts."""
    takeovers: Count = 0
    """Stages that another worker has taken over."""
    restores: Count = 0
    """Times that the job went back to a checkpoint."""
    restarts: Count = 0
    """Failures that counted towards backoffLimit."""
    training: TrainingProgress = TrainingProgress()
    """The progress of the training."""
    checkpoint: CheckpointStatus = CheckpointStatus()
    """The newest complete checkpoint."""
    cost: JobCost = JobCost()
    """The cost of the workers' nodes, by the prices of the node pools and in their currency."""
    digests: Annotated[
        tuple[
            Annotated[str, _schema(maxLength=64, description="The digest of one stage, in the order of stages.")], ...
        ]
        | None,
        _schema(maxItems=1024, **_ATOMIC),
    ] = None
    """The sha256 of each stage's final parameters and optimizer state, once the job is complete."""
    plan: Annotated[str | None, _schema(maxLength=262144)] = None
    """The assignment of workers as JSON: {"epoch": ..., "pipelines": [[worker of stage 0, ...], ...]}."""

    def condition(self, kind: str) -> ReportedCondition | None:
        return next((one for one in self.conditions if one.type == kind), None)

    def holds(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.holds

    @property
    def ended(self) -> ReportedCondition | None:
        """Return the condition with which the job ended; None before."""
        return next((one for one in self.conditions if one.type in ("Complete", "Failed") and one.holds), None)

    @property
    def stopped_early(self) -> str:
        """Return why the job completed before its last step; "" if it did not."""
        ended = self.ended
        return ended.message if ended is not None and ended.reason == EARLY_STOPPED else ""

    @property
    def plan_record(self) -> PlanRecord:
        """Return the record of the plan; an empty one if it is absent, of another version, or wrong."""
        try:
            return msgspec.json.decode(self.plan or "", type=PlanRecord)
        except msgspec.DecodeError:
            return PlanRecord()


def read_status(document: Any) -> BambooJobStatus:
    """Read the status of a BambooJob. document: its status field; None if the operator has not written one yet. A
    malformed status reads as an empty one.
    """
    return read_api_part(BambooJobStatus, document)
