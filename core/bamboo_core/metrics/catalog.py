"""All metrics that Bamboo exports: names, help texts, labels. docs/metrics.md is generated from them."""

from typing import Final

from bamboo_core.histogram import DURATIONS, STALLS, STEP_SECONDS, Buckets
from bamboo_core.metrics.exposition import Metric

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


LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _job(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    """Return the declaration of a job's metric, which the operator exports."""
    return Metric(name=f"bamboo_job_{name}", help=help, labels=("namespace", "job", *labels), buckets=buckets)


def _operator(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    return Metric(name=f"bamboo_operator_{name}", help=help, labels=labels, buckets=buckets)


def _worker(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    """Return the declaration of a worker's metric. The scraper adds namespace, job and pod: a worker runs its user's
    code and could claim others.
    """
    return Metric(name=f"bamboo_worker_{name}", help=help, labels=labels, buckets=buckets)


# A job's progress

JOB_STEP = _job("step", "Committed steps. A job that starts again begins at 0.")
JOB_DESIRED_STEPS = _job("desired_steps", "Steps that the job requests.")
JOB_SAMPLES = _job("samples_total", "Samples of committed steps that went into the model; repeated ones count once.")
JOB_LOST_SAMPLES = _job("lost_samples_total", "Samples of committed steps that did not go into the model.")
JOB_SKIPPED_STEPS = _job(
    "skipped_steps_total", "Steps that left the model as it was, because their loss or gradient was not finite."
)
JOB_LOSS = _job("loss", "Loss of the last committed step.")
JOB_EVALUATION = _job("evaluation", "What the newest evaluation measured.", "metric")
JOB_EVALUATED_STEP = _job("evaluated_step", "After which step the newest evaluation was made.")
JOB_METRIC = _job(
    "metric", "What the task measures of the last committed step besides its loss, at most 64 of them.", "metric"
)
JOB_STEP_DURATION = _job("step_duration_seconds", "Usual duration of a step: the median of the last 20.")
JOB_SAMPLES_PER_SECOND = _job("samples_per_second", "Samples trained in a second, at the usual duration of a step.")
JOB_ETA = _job("eta_seconds", "Time until the last step, at the usual duration of a step.")
JOB_LAST_COMMIT = _job(
    "last_commit_timestamp_seconds", "When the last step was committed, or the operator began to manage the job."
)
JOB_EPOCH = _job("epoch", "Epoch of the plan, one more with every change of it.")

# A job's condition

JOB_STATE = _job("state", "1 for the job's state, as in status.state; 0 for all others.", "state")
JOB_CONDITION = _job("condition", "1 if that condition of the job's status is True, else 0.", "condition")
JOB_RESTARTS = _job("restarts_total", "Failures of workers that counted towards backoffLimit.")
JOB_UNPROTECTED_STAGES = _job(
    "unprotected_stages",
    "Stages whose state no second worker has in step, or with spread.workersPerNode above 1 none on a second node.",
)
JOB_PROTECTED = _job(
    "protected",
    "1 if any single worker, or node with spread.workersPerNode above 1, could be lost without losing state,"
    " else 0. reason: of condition Protected.",
    "reason",
)
JOB_REPLICAS = _job(
    "replicas", "Replicas in step of the stage that has the fewest; other pipelines' owners of it count."
)
JOB_DESIRED_REPLICAS = _job("desired_replicas", "Replicas of each stage that spec.redundancy asks for.")

# A job's workers

JOB_WORKERS = _job("workers", "Workers that have joined, by state.", "state")
JOB_DESIRED_WORKERS = _job("desired_workers", "Workers that the job requests, including spare ones.")
JOB_UPDATED_WORKERS = _job("updated_workers", "Workers that are ready and whose pods are as they would be made now.")
JOB_ROLLOUT_STATE = _job(
    "rollout_state", "1 for the state of the rollout (Complete, Progressing, Stalled); 0 for all others.", "state"
)
JOB_READY_WORKERS = _job("ready_workers", "Workers that have loaded their task.")
JOB_PODS = _job("pods", "Workers' pods that have not ended, by node pool and its capacity.", "pool", "capacity")
JOB_PAID_PODS = _job("paid_pods", "Those of bamboo_job_pods that have a node, which is paid for.", "pool", "capacity")
JOB_PIPELINES = _job("pipelines", "Pipelines of the plan.")
JOB_DESIRED_PIPELINES = _job("desired_pipelines", "The most pipelines for which workers are requested.")

# A job's disturbances

JOB_PREEMPTIONS = _job(
    "preemptions_total",
    "Workers lost, by whatever cause, or given notice; notice: true if there was one, else false.",
    "notice",
)
JOB_SIGNALS = _job(
    "signals_total",
    "Notices and losses of workers that were seen in the cluster, by the reason of the Kubernetes event.",
    "source",
)
JOB_TAKEOVER_PAUSE = _job(
    "takeover_pause_seconds",
    "Pause of each takeover, from the first sign of the loss until the lost work is repeated.",
    "notice",
    buckets=PAUSES,
)
JOB_TAKEOVER_PHASE = _job(
    "takeover_phase_seconds",
    "The same pause in three parts. decide: until the plan is made; reform: until it is in force at the new owner; "
    "recompute: until the lost work is repeated.",
    "phase",
    buckets=PAUSES,
)
JOB_TAKEOVER_PASSES = _job(
    "takeover_passes_total", "Microbatches' passes that takeovers repeated: forward, backward.", "kind"
)

# A job's checkpoints, if it keeps any

JOB_CHECKPOINT_STEP = _job(
    "checkpoint_step", "Step of the newest checkpoint; without one, the step that the job began with."
)
JOB_CHECKPOINT_EVERY = _job("checkpoint_every_steps", "Steps from one checkpoint to the next, as the manifest has it.")
JOB_CHECKPOINT_AGE = _job(
    "checkpoint_age_seconds", "Time since the newest checkpoint was complete; nothing without one."
)
JOB_CHECKPOINT_DURATION = _job(
    "checkpoint_duration_seconds",
    "From the commit of a checkpoint's step until its manifest was written.",
    buckets=DURATIONS,
)
JOB_CHECKPOINT_STALL = _job("checkpoint_stall_seconds", "How long training waited for each checkpoint.", buckets=STALLS)
JOB_CHECKPOINT_BYTES = _job(
    "checkpoint_written_bytes_total",
    "Bytes that were written to the store, also of checkpoints that were given up later.",
)
JOB_CHECKPOINTS_ABANDONED = _job(
    "checkpoints_abandoned_total",
    "Checkpoints that were given up. reason: WriterLost, StoreFailed, TooSlow, TooLate, or WentBack when the job "
    "itself went back to an older one.",
    "reason",
)
JOB_RESTORES = _job(
    "restores_total",
    "Times that the job went back to a checkpoint. cause: StageLost, WorkersGone for all workers, "
    "ResultsDiffer for silent corruption, or Suspended where a suspended job's newest steps were not kept.",
    "cause",
)
JOB_RESTORE_PROBLEMS = _job(
    "restore_problems_total",
    "Times that a worker could not begin with a checkpoint. reason: Damaged, then an older one is tried; Unreadable, "
    "then the same again.",
    "reason",
)
JOB_REPEATED_STEPS = _job(
    "repeated_steps_total", "Committed steps that were repeated as the job went back to a checkpoint."
)
JOB_REPEATED_SECONDS = _job("repeated_seconds_total", "The usual duration of those steps.")

# A job's costs

JOB_USEFUL = _job("useful_worker_seconds_total", "The useful part of bamboo_job_paid_worker_seconds_total.")
JOB_PAID = _job("paid_worker_seconds_total", "Time times the workers' pods that have a node.")
JOB_COST_PER_HOUR = _job(
    "cost_per_hour", "What the pods that have a node cost in an hour, by their pools' pricePerHour."
)
JOB_COST = _job("cost_total", "What the job's pods cost, by its pools' pricePerHour.")
JOB_COST_SO_FAR = _job(
    "cost_so_far", "What the job has cost so far, across operator restarts, as in status.cost.total."
)
JOB_COST_PER_SAMPLES = _job("cost_per_million_samples", "Cost so far over samples so far, times a million.")

# Its workers' speed, memory and traffic

JOB_STRAGGLERS = _job("stragglers", "Workers that are slower than others with the same work, and hold the job up so.")
JOB_STRAGGLER_SECONDS = _job(
    "straggler_microbatch_seconds",
    "Of each of them: what it takes for a microbatch of its stage (own), and what others would (usual).",
    "worker",
    "whose",
)
JOB_STEP_SENT = _job("step_sent_bytes", "What a worker sends to the others in a step, by kind, in the mean.", "kind")

# The operator

OPERATOR_INFO = _operator("info", "Always 1; version: of the operator.", "version")
OPERATOR_JOBS = _operator("jobs", "Jobs that the operator manages, by state.", "state")
OPERATOR_RECONCILES = _operator(
    "reconciles_total",
    "Reconciliations of running jobs; result: ok, or failed if the API server refused a part.",
    "result",
)
OPERATOR_RECONCILE_DURATION = _operator(
    "reconcile_duration_seconds", "Duration of a reconciliation, its API calls included.", buckets=LATENCIES
)
OPERATOR_OLDEST_RECONCILE = _operator(
    "oldest_reconcile_age_seconds", "Time since the last reconciliation of the job that has waited longest."
)
OPERATOR_API_REQUESTS = _operator(
    "api_requests_total",
    "Calls to the API server, without the watches. code: of the answer, or error without one.",
    "verb",
    "resource",
    "code",
)
OPERATOR_API_DURATION = _operator(
    "api_request_duration_seconds", "Duration of these calls.", "verb", "resource", buckets=LATENCIES
)
OPERATOR_WATCH_EVENTS = _operator(
    "watch_events_total", "What the API server reported, by kind of object: job, pod or node.", "kind"
)
OPERATOR_EVENTS = _operator("events_total", "Events that coordinators have handled, by type.", "event")
OPERATOR_EVENT_QUEUE = _operator("event_queue_depth", "Events that wait for their coordinator.")
OPERATOR_TICK_DELAY = _operator(
    "tick_delay_seconds",
    "How late the coordinators' periodic ticks were, which is how long an event waits.",
    buckets=LATENCIES,
)
OPERATOR_CHANNELS = _operator("control_channels", "Workers that are connected.")
OPERATOR_REFUSALS = _operator("refusals_total", "Callers at the workers' port that were refused, by reason.", "reason")

# Workers

WORKER_INFO = _worker(
    "info",
    "Always 1. worker: its name; device: what it computes on; version: of the trainer.",
    "worker",
    "device",
    "version",
)
WORKER_STEP_DURATION = _worker(
    "step_duration_seconds",
    "Time between two commits. Only the owner of the first stage of the first pipeline counts.",
    buckets=STEP_SECONDS,
)
WORKER_TIME = _worker(
    "time_seconds_total", "How the worker spent its time. The bubble is idle and rehearsal together.", "kind"
)
WORKER_SENT = _worker(
    "sent_bytes_total",
    "Sent to the network, by kind: activation, gradient, reduction, kept (sums of finished groups), tied, sync (final "
    "gradients for replicas), state (whole states for replicas), layers (after another split, or from a "
    "checkpoint's copies) or control.",
    "kind",
)
WORKER_RESENT = _worker("resent_bytes_total", "The part of it that had been sent before, from the log.", "kind")
WORKER_BROKEN_LINKS = _worker("broken_links_total", "Times that a link to a peer in the plan broke.")
WORKER_CHECKPOINT_BYTES = _worker("checkpoint_written_bytes_total", "Its parts of checkpoints, written to the store.")
WORKER_CHECKPOINT_STALL = _worker(
    "checkpoint_stall_seconds_total", "How long it has not trained because it copied its parts of checkpoints."
)
WORKER_MICROBATCH = _worker(
    "microbatch_seconds",
    "What a microbatch takes in the stages that the worker runs, without waits: the median of the newest ones.",
    "stage",
    "pass",
)
WORKER_COMPILE = _worker("compile_seconds", "What compiling the layers of each stage that it holds took.", "stage")
WORKER_MEMORY_PEAK = _worker(
    "memory_peak_bytes",
    "The most memory that it has taken so far: of its GPU with the least left, or without GPUs of the host.",
)
WORKER_MEMORY_LIMIT = _worker("memory_limit_bytes", "How much of that memory it may take.")

EVERY_METRIC: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
