"""Checks of exported metrics against the catalog."""

from prometheus_client.parser import text_string_to_metric_families

from bamboo_core.metrics.catalog import EVERY_METRIC
from bamboo_core.metrics.exposition import Metric, MetricKind

STANDARD = "process_"  # prometheus-client's own
SOMETIMES = {
    "bamboo_operator_api_requests_total",
    "bamboo_operator_api_request_duration_seconds",
    "bamboo_job_signals_total",
    "bamboo_operator_refusals_total",
    "bamboo_job_metric",
    "bamboo_job_evaluation",
    "bamboo_job_evaluated_step",
    "bamboo_job_straggler_microbatch_seconds",
    "bamboo_job_step_sent_bytes",
}


def declared(prefix: str) -> dict[str, Metric]:
    """Return the catalog's metrics whose names begin with `prefix`, by family name."""
    return {_family(metric): metric for metric in EVERY_METRIC if metric.name.startswith(prefix)}


def _family(metric: Metric) -> str:
    return metric.name.removesuffix("_total") if metric.kind is MetricKind.COUNTER else metric.name


def check_page(prefix: str, text: str, *, complete: bool) -> None:
    """Check the names, kinds, help texts and labels of the metrics on an exported page against the catalog.

    prefix: the start of the metrics' names. complete: all metrics with that prefix must be present, except SOMETIMES.
    """
    known = declared(prefix)
    found = [family for family in text_string_to_metric_families(text) if not family.name.startswith(STANDARD)]
    assert {family.name for family in found} <= known.keys()
    for family in found:
        metric = known[family.name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        for sample in family.samples:
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == {*metric.labels, *extra}, sample
    if complete:
        missing = {metric.name for metric in known.values()} - {known[family.name].name for family in found}
        assert missing <= SOMETIMES, missing
