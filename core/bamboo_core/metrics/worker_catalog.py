"""The metrics that each worker exports, with help texts and labels."""

from bamboo_core.metrics.exposition import Buckets, Exporter, Metric, MetricKind
from bamboo_core.metrics.histogram import STEP_SECONDS


def _worker(name: str, kind: MetricKind, help: str, *labels: str, unit: str = "", buckets: Buckets = ()) -> Metric:
    """Return the declaration of a worker's metric. The scraper adds namespace, job and pod: a worker runs its user's
    code and could claim others.
    """
    full = f"bamboo_worker_{name}"
    return Metric(name=full, kind=kind, help=help, labels=labels, unit=unit, by=Exporter.WORKER, buckets=buckets)


WORKER_INFO = _worker(
    "info",
    MetricKind.GAUGE,
    "Always 1. worker: its name; device: what it computes on; version: of the trainer.",
    *("worker", "device", "version"),
)
WORKER_STEP = _worker("step", MetricKind.GAUGE, "Committed steps of the job, as far as this worker knows.")
WORKER_STAGES = _worker("stages", MetricKind.GAUGE, "Stages whose state it holds; role: owner or replica.", "role")
WORKER_STEP_DURATION = _worker(
    "step_duration_seconds",
    MetricKind.HISTOGRAM,
    "Time between two commits. Only the owner of the first stage of the first pipeline counts.",
    unit="seconds",
    buckets=STEP_SECONDS,
)
WORKER_TIME = _worker(
    "time_seconds_total",
    MetricKind.COUNTER,
    "How the worker spent its time. The bubble is idle and rehearsal together.",
    "kind",
    unit="seconds",
)
WORKER_SENT = _worker(
    "sent_bytes_total",
    MetricKind.COUNTER,
    "Sent to the network, by kind: activation, gradient, reduction, kept (sums of finished groups), tied, sync (final "
    "gradients for replicas), state (whole states for replicas), layers (after another split, or from a "
    "checkpoint's copies) or control.",
    "kind",
    unit="bytes",
)
WORKER_RESENT = _worker(
    "resent_bytes_total",
    MetricKind.COUNTER,
    "The part of it that had been sent before, from the log.",
    "kind",
    unit="bytes",
)
WORKER_BROKEN_LINKS = _worker(
    "broken_links_total", MetricKind.COUNTER, "Times that a link to a peer in the plan broke."
)
WORKER_CHECKPOINT_BYTES = _worker(
    "checkpoint_written_bytes_total",
    MetricKind.COUNTER,
    "Its parts of checkpoints, written to the store.",
    unit="bytes",
)
WORKER_CHECKPOINT_STALL = _worker(
    "checkpoint_stall_seconds_total",
    MetricKind.COUNTER,
    "How long it has not trained because it copied its parts of checkpoints.",
    unit="seconds",
)
WORKER_MICROBATCH = _worker(
    "microbatch_seconds",
    MetricKind.GAUGE,
    "What a microbatch takes in the stages that the worker runs, without waits: the median of the newest ones.",
    "stage",
    "pass",
    unit="seconds",
)
WORKER_COMPILE = _worker(
    "compile_seconds",
    MetricKind.GAUGE,
    "What compiling the layers of each stage that it holds took.",
    "stage",
    unit="seconds",
)
WORKER_MEMORY_PEAK = _worker(
    "memory_peak_bytes",
    MetricKind.GAUGE,
    "The most memory that it has taken so far: of its GPU with the least left, or without GPUs of the host.",
    unit="bytes",
)
WORKER_MEMORY_LIMIT = _worker(
    "memory_limit_bytes",
    MetricKind.GAUGE,
    "How much of that memory it may take.",
    unit="bytes",
)
