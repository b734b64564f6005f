"""Generate the lists in docs/metrics.md from the catalogue of metrics (`make docs`). A test fails if one is stale.

The committed page names the metrics with their labels; the page of the site explains each in a table.
"""

from collections.abc import Iterator
from pathlib import Path

from bamboo_core.metrics.catalog import EVERY_METRIC
from bamboo_core.metrics.exposition import Metric, MetricKind

PAGE = Path(__file__).with_name("metrics.md")

BEGIN = "<!-- metrics: made by `make docs` from core/bamboo_core/metrics -->\n"
END = "<!-- end of metrics -->\n"

SECTIONS = (
    (
        "Jobs",
        "bamboo_job_",
        "The operator serves them. Those that end with `_total` are counters,"
        " the others gauges or, where marked, histograms; labels are in brackets.",
    ),
    (
        "The operator",
        "bamboo_operator_",
        "The operator serves them, beside the standard `process_*`.",
    ),
    (
        "Workers",
        "bamboo_worker_",
        "Each worker's pod serves them, beside the standard `process_*`; the scrape adds `namespace`, `job` and `pod`.",
    ),
)


def page(text: str, whole: bool = False) -> str:
    """Return the page's text with new lists of metrics. whole: tables with explanations, for the site."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the comments between which the metrics belong"
    lines = [line for section in SECTIONS for line in _section(*section, whole)]
    tables = "\n".join(lines)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def _section(title: str, prefix: str, text: str, whole: bool) -> Iterator[str]:
    metrics = [metric for metric in EVERY_METRIC if metric.name.startswith(prefix)]
    yield from (f"## {title}", "", text, "")
    if whole:
        yield from ("| Metric | What |", "| --- | --- |")
        yield from (f"| `{metric.name}` | {metric.help}{_marks(metric)} |" for metric in metrics)
    else:
        yield ", ".join(f"`{metric.name}`{_marks(metric)}" for metric in metrics) + "."
    yield ""


def _marks(metric: Metric) -> str:
    """Return a metric's labels except namespace and job, and "histogram" for a histogram, in brackets; "" for none."""
    labels = [f"`{label}`" for label in metric.labels if label not in ("namespace", "job")]
    marks = [*labels, *(["histogram"] if metric.kind is MetricKind.HISTOGRAM else [])]
    return f" ({', '.join(marks)})" if marks else ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
