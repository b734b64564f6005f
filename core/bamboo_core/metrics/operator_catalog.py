"""The operator's own metrics, with help texts and labels."""

from bamboo_core.metrics.exposition import Buckets, Exporter, Metric, MetricKind

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _operator(name: str, kind: MetricKind, help: str, *labels: str, unit: str = "", buckets: Buckets = ()) -> Metric:
    full = f"bamboo_operator_{name}"
    return Metric(name=full, kind=kind, help=help, labels=labels, unit=unit, by=Exporter.OPERATOR, buckets=buckets)


OPERATOR_INFO = _operator(
    "info",
    MetricKind.GAUGE,
    "Always 1; version: of the operator.",
    "version",
)
OPERATOR_JOBS = _operator("jobs", MetricKind.GAUGE, "Jobs that the operator manages, by state.", "state")
OPERATOR_RECONCILES = _operator(
    "reconciles_total",
    MetricKind.COUNTER,
    "Reconciliations of running jobs; result: ok, or failed if the API server refused a part.",
    "result",
)
OPERATOR_RECONCILE_DURATION = _operator(
    "reconcile_duration_seconds",
    MetricKind.HISTOGRAM,
    "Duration of a reconciliation, its API calls included.",
    unit="seconds",
    buckets=LATENCIES,
)
OPERATOR_OLDEST_RECONCILE = _operator(
    "oldest_reconcile_age_seconds",
    MetricKind.GAUGE,
    "Time since the last reconciliation of the job that has waited longest.",
    unit="seconds",
)
OPERATOR_API_REQUESTS = _operator(
    "api_requests_total",
    MetricKind.COUNTER,
    "Calls to the API server, without the watches. code: of the answer, or error without one.",
    *("verb", "resource", "code"),
)
OPERATOR_API_DURATION = _operator(
    "api_request_duration_seconds",
    MetricKind.HISTOGRAM,
    "Duration of these calls.",
    "verb",
    "resource",
    unit="seconds",
    buckets=LATENCIES,
)
OPERATOR_WATCH_EVENTS = _operator(
    "watch_events_total",
    MetricKind.COUNTER,
    "What the API server reported, by kind of object: job, pod or node.",
    "kind",
)
OPERATOR_EVENTS = _operator(
    "events_total", MetricKind.COUNTER, "Events that coordinators have handled, by type.", "event"
)
OPERATOR_EVENT_QUEUE = _operator("event_queue_depth", MetricKind.GAUGE, "Events that wait for their coordinator.")
OPERATOR_TICK_DELAY = _operator(
    "tick_delay_seconds",
    MetricKind.HISTOGRAM,
    "How late the coordinators' periodic ticks were, which is how long an event waits.",
    unit="seconds",
    buckets=LATENCIES,
)
OPERATOR_CHANNELS = _operator("control_channels", MetricKind.GAUGE, "Workers that are connected.")
OPERATOR_REFUSALS = _operator(
    "refusals_total", MetricKind.COUNTER, "Callers at the workers' port that were refused, by reason.", "reason"
)
