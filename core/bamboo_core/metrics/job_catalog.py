"""The metrics of a job, with help texts and labels."""

from bamboo_core.coordinator.checkpoint_counts import DURATIONS, STALLS
from bamboo_core.metrics.exposition import Buckets, Exporter, Metric, MetricKind

STATES = (
    "Pending",
    "Running",
    "Degraded",
    "Restoring",
    "Suspended",
    "Invalid",
    "Complete",
    "Failed",
)
PHASES = ("decide", "reform", "recompute")  # of a takeover

PAUSES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def _job(name: str, kind: MetricKind, help: str, *labels: str, unit: str = "", buckets: Buckets = ()) -> Metric:
    """Return the declaration of a job's metric, which the operator exports."""
    names, full = ("namespace", "job", *labels), f"bamboo_job_{name}"
    return Metric(name=full, kind=kind, help=help, labels=names, unit=unit, by=Exporter.OPERATOR, buckets=buckets)


# A job's progress

JOB_STEP = _job("step", MetricKind.GAUGE, "Committed steps. A job that starts again begins at 0.")
JOB_DESIRED_STEPS = _job("desired_steps", MetricKind.GAUGE, "Steps that the job requests.")
JOB_SAMPLES = _job(
    "samples_total",
    MetricKind.COUNTER,
    "Samples of committed steps that went into the model; repeated ones count once.",
    unit="samples",
)
JOB_LOST_SAMPLES = _job(
    "lost_samples_total",
    MetricKind.COUNTER,
    "Samples of committed steps that did not go into the model.",
    unit="samples",
)
JOB_SKIPPED_STEPS = _job(
    "skipped_steps_total",
    MetricKind.COUNTER,
    "Steps that left the model as it was, because their loss or gradient was not finite.",
)
JOB_LOSS = _job("loss", MetricKind.GAUGE, "Loss of the last committed step.")
JOB_EVALUATION = _job(
    "evaluation",
    MetricKind.GAUGE,
    "What the newest evaluation measured.",
    "metric",
)
JOB_EVALUATED_STEP = _job("evaluated_step", MetricKind.GAUGE, "After which step the newest evaluation was made.")
JOB_METRIC = _job(
    "metric",
    MetricKind.GAUGE,
    "What the task measures of the last committed step besides its loss, at most 64 of them.",
    "metric",
)
JOB_STEP_DURATION = _job(
    "step_duration_seconds", MetricKind.GAUGE, "Usual duration of a step: the median of the last 20.", unit="seconds"
)
JOB_SAMPLES_PER_SECOND = _job(
    "samples_per_second", MetricKind.GAUGE, "Samples trained in a second, at the usual duration of a step."
)
JOB_ETA = _job(
    "eta_seconds", MetricKind.GAUGE, "Time until the last step, at the usual duration of a step.", unit="seconds"
)
JOB_LAST_COMMIT = _job(
    "last_commit_timestamp_seconds",
    MetricKind.GAUGE,
    "When the last step was committed, or the operator began to manage the job.",
    unit="seconds",
)
JOB_EPOCH = _job("epoch", MetricKind.GAUGE, "Epoch of the plan, one more with every change of it.")

# A job's condition

JOB_STATE = _job(
    "state",
    MetricKind.GAUGE,
    "1 for the job's state, as in status.state; 0 for all others.",
    "state",
)
JOB_CONDITION = _job(
    "condition", MetricKind.GAUGE, "1 if that condition of the job's status is True, else 0.", "condition"
)
JOB_RESTARTS = _job("restarts_total", MetricKind.COUNTER, "Failures of workers that counted towards backoffLimit.")
JOB_UNPROTECTED_STAGES = _job(
    "unprotected_stages",
    MetricKind.GAUGE,
    "Stages whose state no second worker has in step, or with spread.workersPerNode above 1 none on a second node.",
)
JOB_PROTECTED = _job(
    "protected",
    MetricKind.GAUGE,
    "1 if any single worker, or node with spread.workersPerNode above 1, could be lost without losing state,"
    " else 0. reason: of condition Protected.",
    "reason",
)
JOB_REPLICAS = _job(
    "replicas",
    MetricKind.GAUGE,
    "Replicas in step of the stage that has the fewest; other pipelines' owners of it count.",
)
JOB_DESIRED_REPLICAS = _job(
    "desired_replicas", MetricKind.GAUGE, "Replicas of each stage that spec.redundancy asks for."
)

# A job's workers

JOB_WORKERS = _job("workers", MetricKind.GAUGE, "Workers that have joined, by state.", "state")
JOB_DESIRED_WORKERS = _job("desired_workers", MetricKind.GAUGE, "Workers that the job requests, including spare ones.")
JOB_UPDATED_WORKERS = _job(
    "updated_workers",
    MetricKind.GAUGE,
    "Workers that are ready and whose pods are as they would be made now.",
)
JOB_ROLLOUT_STATE = _job(
    "rollout_state",
    MetricKind.GAUGE,
    "1 for the state of the rollout (Complete, Progressing, Stalled); 0 for all others.",
    "state",
)
JOB_READY_WORKERS = _job("ready_workers", MetricKind.GAUGE, "Workers that have loaded their task.")
JOB_PODS = _job(
    "pods",
    MetricKind.GAUGE,
    "Workers' pods that have not ended, by node pool and its capacity.",
    "pool",
    "capacity",
)
JOB_PAID_PODS = _job(
    "paid_pods",
    MetricKind.GAUGE,
    "Those of bamboo_job_pods that have a node, which is paid for.",
    "pool",
    "capacity",
)
JOB_PIPELINES = _job("pipelines", MetricKind.GAUGE, "Pipelines of the plan.")
JOB_DESIRED_PIPELINES = _job(
    "desired_pipelines", MetricKind.GAUGE, "The most pipelines for which workers are requested."
)

# A job's disturbances

JOB_PREEMPTIONS = _job(
    "preemptions_total",
    MetricKind.COUNTER,
    "Workers lost, by whatever cause, or given notice; notice: true if there was one, else false.",
    "notice",
)
JOB_SIGNALS = _job(
    "signals_total",
    MetricKind.COUNTER,
    "Notices and losses of workers that were seen in the cluster, by the reason of the Kubernetes event.",
    "source",
)
JOB_TAKEOVER_PAUSE = _job(
    "takeover_pause_seconds",
    MetricKind.HISTOGRAM,
    "Pause of each takeover, from the first sign of the loss until the lost work is repeated.",
    "notice",
    unit="seconds",
    buckets=PAUSES,
)
JOB_TAKEOVER_PHASE = _job(
    "takeover_phase_seconds",
    MetricKind.HISTOGRAM,
    "The same pause in three parts. decide: until the plan is made; reform: until it is in force at the new owner; "
    "recompute: until the lost work is repeated.",
    "phase",
    unit="seconds",
    buckets=PAUSES,
)
JOB_TAKEOVER_PASSES = _job(
    "takeover_passes_total",
    MetricKind.COUNTER,
    "Microbatches' passes that takeovers repeated: forward, backward.",
    "kind",
)

# A job's checkpoints, if it keeps any

JOB_CHECKPOINT_STEP = _job(
    "checkpoint_step",
    MetricKind.GAUGE,
    "Step of the newest checkpoint; without one, the step that the job began with.",
)
JOB_CHECKPOINT_EVERY = _job(
    "checkpoint_every_steps", MetricKind.GAUGE, "Steps from one checkpoint to the next, as the manifest has it."
)
JOB_CHECKPOINT_AGE = _job(
    "checkpoint_age_seconds",
    MetricKind.GAUGE,
    "Time since the newest checkpoint was complete; nothing without one.",
    unit="seconds",
)
JOB_CHECKPOINT_DURATION = _job(
    "checkpoint_duration_seconds",
    MetricKind.HISTOGRAM,
    "From the commit of a checkpoint's step until its manifest was written.",
    unit="seconds",
    buckets=DURATIONS,
)
JOB_CHECKPOINT_STALL = _job(
    "checkpoint_stall_seconds",
    MetricKind.HISTOGRAM,
    "How long training waited for each checkpoint.",
    unit="seconds",
    buckets=STALLS,
)
JOB_CHECKPOINT_BYTES = _job(
    "checkpoint_written_bytes_total",
    MetricKind.COUNTER,
    "Bytes that were written to the store, also of checkpoints that were given up later.",
    unit="bytes",
)
JOB_CHECKPOINTS_ABANDONED = _job(
    "checkpoints_abandoned_total",
    MetricKind.COUNTER,
    "Checkpoints that were given up. reason: WriterLost, StoreFailed, TooSlow, TooLate, or WentBack when the job "
    "itself went back to an older one.",
    "reason",
)
JOB_RESTORES = _job(
    "restores_total",
    MetricKind.COUNTER,
    "Times that the job went back to a checkpoint. cause: StageLost, WorkersGone for all workers, "
    "ResultsDiffer for silent corruption, or Suspended where a suspended job's newest steps were not kept.",
    "cause",
)
JOB_RESTORE_PROBLEMS = _job(
    "restore_problems_total",
    MetricKind.COUNTER,
    "Times that a worker could not begin with a checkpoint. reason: Damaged, then an older one is tried; Unreadable, "
    "then the same again.",
    "reason",
)
JOB_REPEATED_STEPS = _job(
    "repeated_steps_total",
    MetricKind.COUNTER,
    "Committed steps that were repeated as the job went back to a checkpoint.",
)
JOB_REPEATED_SECONDS = _job(
    "repeated_seconds_total", MetricKind.COUNTER, "The usual duration of those steps.", unit="seconds"
)

# A job's costs

JOB_USEFUL = _job(
    "useful_worker_seconds_total",
    MetricKind.COUNTER,
    "The useful part of bamboo_job_paid_worker_seconds_total.",
    unit="seconds",
)
JOB_PAID = _job(
    "paid_worker_seconds_total",
    MetricKind.COUNTER,
    "Time times the workers' pods that have a node.",
    unit="seconds",
)
JOB_COST_PER_HOUR = _job(
    "cost_per_hour",
    MetricKind.GAUGE,
    "What the pods that have a node cost in an hour, by their pools' pricePerHour.",
)
JOB_COST = _job(
    "cost_total",
    MetricKind.COUNTER,
    "What the job's pods cost, by its pools' pricePerHour.",
)
JOB_COST_SO_FAR = _job(
    "cost_so_far",
    MetricKind.GAUGE,
    "What the job has cost so far, across operator restarts, as in status.cost.total.",
)
JOB_COST_PER_SAMPLES = _job(
    "cost_per_million_samples", MetricKind.GAUGE, "Cost so far over samples so far, times a million."
)

# Its workers' speed, memory and traffic

JOB_STRAGGLERS = _job(
    "stragglers", MetricKind.GAUGE, "Workers that are slower than others with the same work, and hold the job up so."
)
JOB_STRAGGLER_SECONDS = _job(
    "straggler_microbatch_seconds",
    MetricKind.GAUGE,
    "Of each of them: what it takes for a microbatch of its stage (own), and what others would (usual).",
    "worker",
    "whose",
    unit="seconds",
)
JOB_STEP_SENT = _job(
    "step_sent_bytes",
    MetricKind.GAUGE,
    "What a worker sends to the others in a step, by kind, in the mean.",
    "kind",
    unit="bytes",
)
