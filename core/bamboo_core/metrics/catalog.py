"""All of Bamboo's own metrics: names, help texts, labels, buckets. docs/metrics.md is generated from them."""

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
    "Terminating",
    "Complete",
    "Failed",
)
PHASES = ("decide", "reform", "recompute")  # of a takeover

PAUSES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _job(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    """Declare a metric that the operator exports for each job, with the labels namespace and job before `labels`."""
    return Metric(name=f"bamboo_job_{name}", help=help, labels=("namespace", "job", *labels), buckets=buckets)


def _operator(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    return Metric(name=f"bamboo_operator_{name}", help=help, labels=labels, buckets=buckets)


def _worker(name: str, help: str, *labels: str, buckets: Buckets = ()) -> Metric:
    """Return the declaration of a worker's metric. The scraper adds namespace, job and pod, because a worker runs its
    user's code, which could name another job.
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
JOB_EVALUATION = _job("evaluation", "Metrics of the newest evaluation, by name.", "metric")
JOB_EVALUATED_STEP = _job("evaluated_step", "Step after which the newest evaluation was made.")
JOB_METRIC = _job("metric", "Metrics of the task, besides the loss, in the last committed step; at most 64.", "metric")
JOB_STEP_DURATION = _job("step_duration_seconds", "Median duration of the last 20 steps.")
JOB_SAMPLES_PER_SECOND = _job("samples_per_second", "Samples trained per second, by the median duration of a step.")
JOB_ETA = _job("eta_seconds", "Estimated time until the last step is committed.")
JOB_LAST_COMMIT = _job(
    "last_commit_timestamp_seconds",
    "Unix time of the last commit, or of the moment when the operator began to manage the job.",
)
JOB_EPOCH = _job("epoch", "Epoch of the plan; each new plan raises it by one.")

# A job's condition

JOB_STATE = _job("state", "1 for the job's state (status.state), 0 for every other state.", "state")
JOB_CONDITION = _job("condition", "1 if the condition in the job's status is True, else 0.", "condition")
JOB_RESTARTS = _job("restarts_total", "Failures of workers that counted towards backoffLimit.")
JOB_UNPROTECTED_STAGES = _job(
    "unprotected_stages",
    "Stages whose current state only one worker holds, or only one node if spread.workersPerNode is above 1.",
)
JOB_PROTECTED = _job(
    "protected",
    "1 if the loss of any one worker (any one node if spread.workersPerNode is above 1) would lose no state, else 0."
    " reason: of condition Protected.",
    "reason",
)
JOB_REPLICAS = _job(
    "replicas", "Current replicas of the stage that has the fewest; its owners in other pipelines count as replicas."
)
JOB_DESIRED_REPLICAS = _job("desired_replicas", "Replicas of each stage that spec.redundancy asks for.")

# A job's workers

JOB_WORKERS = _job("workers", "Workers that have joined, by state.", "state")
JOB_DESIRED_WORKERS = _job("desired_workers", "Workers that the job requests, including spare ones.")
JOB_UPDATED_WORKERS = _job("updated_workers", "Ready workers whose pods match the job's current worker template.")
JOB_ROLLOUT_STATE = _job(
    "rollout_state", "1 for the state of the rollout (Complete, Progressing, Stalled); 0 for all others.", "state"
)
JOB_READY_WORKERS = _job("ready_workers", "Workers that have loaded their task.")
JOB_PODS = _job("pods", "Pods of workers that have not ended, by node pool and capacity type.", "pool", "capacity")
JOB_PAID_PODS = _job("paid_pods", "Pods of bamboo_job_pods that occupy a node and so cost money.", "pool", "capacity")
JOB_PIPELINES = _job("pipelines", "Pipelines of the plan.")
JOB_DESIRED_PIPELINES = _job("desired_pipelines", "Most pipelines for which the job requests workers.")

# A job's disturbances

JOB_PREEMPTIONS = _job(
    "preemptions_total",
    "Workers that were lost for any reason or received a notice. notice: true or false.",
    "notice",
)
JOB_SIGNALS = _job(
    "signals_total",
    "Notices and losses of workers that the operator saw in the cluster. source: reason of the Kubernetes event.",
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
    "takeover_passes_total", "Passes of microbatches that takeovers repeated. kind: forward or backward.", "kind"
)

# A job's checkpoints, if it keeps any

JOB_CHECKPOINT_STEP = _job(
    "checkpoint_step", "Step of the newest checkpoint; without one, the step that the job began with."
)
JOB_CHECKPOINT_EVERY = _job("checkpoint_every_steps", "Steps between checkpoints, from the manifest or computed.")
JOB_CHECKPOINT_AGE = _job(
    "checkpoint_age_seconds", "Time since the newest checkpoint was complete; absent if there is none."
)
JOB_CHECKPOINT_DURATION = _job(
    "checkpoint_duration_seconds",
    "Time from the commit of a checkpoint's step until its manifest is written.",
    buckets=DURATIONS,
)
JOB_CHECKPOINT_STALL = _job(
    "checkpoint_stall_seconds", "Time that training waited for each checkpoint.", buckets=STALLS
)
JOB_CHECKPOINT_BYTES = _job(
    "checkpoint_written_bytes_total",
    "Bytes written to the store, including those of checkpoints that were abandoned later.",
)
JOB_CHECKPOINTS_ABANDONED = _job(
    "checkpoints_abandoned_total",
    "Checkpoints that the coordinator abandoned. reason: WriterLost, StoreFailed, TooSlow, TooLate, or WentBack if the "
    "job itself went back to an older one.",
    "reason",
)
JOB_RESTORES = _job(
    "restores_total",
    "Number of times that the job went back to a checkpoint. cause: StageLost, WorkersGone (all of them), "
    "ResultsDiffer (silent corruption), or Suspended (a suspended job could not save its newest steps).",
    "cause",
)
JOB_RESTORE_PROBLEMS = _job(
    "restore_problems_total",
    "Number of times that a worker could not restore a checkpoint. reason: Damaged (the job tries an older one) or "
    "Unreadable (the job tries the same one again).",
    "reason",
)
JOB_REPEATED_STEPS = _job(
    "repeated_steps_total", "Committed steps that the job repeated because it went back to a checkpoint."
)
JOB_REPEATED_SECONDS = _job(
    "repeated_seconds_total", "Time that the steps of bamboo_job_repeated_steps_total usually take."
)

# A job's costs

JOB_USEFUL = _job("useful_worker_seconds_total", "The useful part of bamboo_job_paid_worker_seconds_total.")
JOB_PAID = _job("paid_worker_seconds_total", "Seconds that workers' pods have occupied nodes, summed over pods.")
JOB_COST_PER_HOUR = _job(
    "cost_per_hour", "Price per hour of all pods that occupy a node, by their pools' pricePerHour."
)
JOB_COST = _job("cost_total", "Cost of the job's pods, by their pools' pricePerHour.")
JOB_COST_SO_FAR = _job("cost_so_far", "Total cost of the job, including before operator restarts (status.cost.total).")
JOB_COST_PER_SAMPLES = _job("cost_per_million_samples", "Total cost per million trained samples.")

# Its workers' speed, memory and traffic

JOB_STRAGGLERS = _job("stragglers", "Workers that are slower than others with the same work, and so delay the job.")
JOB_STRAGGLER_SECONDS = _job(
    "straggler_microbatch_seconds",
    "Time of a straggler for a microbatch of its stage. whose: own, or usual (the time of other workers).",
    "worker",
    "whose",
)
JOB_STEP_SENT = _job("step_sent_bytes", "Mean bytes that a worker sends to other workers in a step, by kind.", "kind")

# The operator

OPERATOR_INFO = _operator("info", "Always 1. version: of the operator.", "version")
OPERATOR_JOBS = _operator("jobs", "Jobs that the operator manages, by state.", "state")
OPERATOR_RECONCILES = _operator(
    "reconciles_total",
    "Reconciliations of running jobs. result: ok, or failed if the API server refused a request.",
    "result",
)
OPERATOR_RECONCILE_DURATION = _operator(
    "reconcile_duration_seconds", "Duration of a reconciliation, including its API calls.", buckets=LATENCIES
)
OPERATOR_OLDEST_RECONCILE = _operator(
    "oldest_reconcile_age_seconds", "Time since the last reconciliation of the job that has waited longest."
)
OPERATOR_API_REQUESTS = _operator(
    "api_requests_total",
    "Calls to the API server, without watches. code: of the response, or error if there was none.",
    "verb",
    "resource",
    "code",
)
OPERATOR_API_DURATION = _operator(
    "api_request_duration_seconds",
    "Duration of calls to the API server, without watches.",
    "verb",
    "resource",
    buckets=LATENCIES,
)
OPERATOR_WATCH_EVENTS = _operator(
    "watch_events_total", "Changes that the API server reported. kind: job, pod or node.", "kind"
)
OPERATOR_EVENTS = _operator("events_total", "Events that coordinators have handled, by type.", "event")
OPERATOR_EVENT_QUEUE = _operator("event_queue_depth", "Events that wait to be handled by a coordinator.")
OPERATOR_TICK_DELAY = _operator(
    "tick_delay_seconds",
    "Delay of the coordinators' periodic ticks, which is also how long an event waits.",
    buckets=LATENCIES,
)
OPERATOR_CHANNELS = _operator("control_channels", "Connected workers.")
OPERATOR_REFUSALS = _operator(
    "refusals_total", "Connections to the workers' port that the operator refused, by reason.", "reason"
)

# Workers

WORKER_INFO = _worker(
    "info",
    "Always 1. worker: its name; device: the type of its device; version: of the trainer.",
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
    "time_seconds_total", "Time of the worker by use. The pipeline bubble is idle plus rehearsal.", "kind"
)
WORKER_SENT = _worker(
    "sent_bytes_total",
    "Bytes sent to the network. kind: activation, gradient, reduction, kept (sums of finished groups), tied, sync "
    "(final gradients for replicas), state (whole states for replicas), layers (after another split, or from a "
    "checkpoint's copies) or control.",
    "kind",
)
WORKER_RESENT = _worker(
    "resent_bytes_total",
    "Bytes sent again from the log after a failure, part of bamboo_worker_sent_bytes_total.",
    "kind",
)
WORKER_BROKEN_LINKS = _worker("broken_links_total", "Number of times that a link to a worker in the plan broke.")
WORKER_CHECKPOINT_BYTES = _worker(
    "checkpoint_written_bytes_total", "Bytes of checkpoints that the worker wrote to the store."
)
WORKER_CHECKPOINT_STALL = _worker(
    "checkpoint_stall_seconds_total", "Time that the worker did not train because it copied its part of a checkpoint."
)
WORKER_MICROBATCH = _worker(
    "microbatch_seconds",
    "Median time of recent microbatches in each stage that the worker runs, without waits.",
    "stage",
    "pass",
)
WORKER_COMPILE = _worker("compile_seconds", "Time to compile the layers of each stage that the worker holds.", "stage")
WORKER_MEMORY_PEAK = _worker(
    "memory_peak_bytes",
    "Peak memory of the worker: of its GPU with the least free memory, or of the host if it has no GPU.",
)
WORKER_MEMORY_LIMIT = _worker(
    "memory_limit_bytes", "Limit of the memory that bamboo_worker_memory_peak_bytes measures."
)

EVERY_METRIC: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
