"""Writes the tables in docs/metrics.md from metrics and alerts: `make docs`. A test fails if one is stale."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bamboo_core.metrics.every_metric import EVERY_METRIC
from bamboo_core.metrics.exposition import Metric, MetricKind

PAGE = Path(__file__).with_name("metrics.md")
ALERTS = Path(__file__).parent.parent / "dashboards" / "alerts.yaml"

BEGIN = "<!-- metrics: made by `make docs` from core/bamboo_core/metrics and dashboards/alerts.yaml -->\n"
END = "<!-- end of metrics -->\n"

SECTIONS = (
    (
        "Jobs",
        "bamboo_job_",
        "Served by the operator. Those that end with `_total` are counters,"
        " others gauges unless it is said; labels are in brackets.",
    ),
    (
        "The operator",
        "bamboo_operator_",
        "Served by the operator, beside the standard `process_*`.",
    ),
    (
        "Workers",
        "bamboo_worker_",
        "Served by every worker's pod, beside the standard `process_*`; the scrape adds `namespace`, `job` and `pod`.",
    ),
)


def page(text: str) -> str:
    """The page with its tables written anew; everything else stays."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the comments between which the tables belong"
    lines = [*(line for section in SECTIONS for line in _section(*section)), *_alerts()]
    tables = "\n".join(lines)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def _section(title: str, prefix: str, text: str) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", "| Metric | What |", "| --- | --- |")
    yield from (_row(metric) for metric in EVERY_METRIC if metric.name.startswith(prefix))
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels if label not in ("namespace", "job"))
    text = f"{metric.help} ({labels})" if labels else metric.help
    text += " (Histogram.)" if metric.kind is MetricKind.HISTOGRAM else ""
    return f"| `{metric.name}` | {text} |"


def _alerts() -> Iterator[str]:
    yield from ("## Alerts", "", "When each fires, and what to do about it, is in alerts.md.", "")
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for severity in ("critical", "warning", "info"):
        names = [rule["alert"] for rule in rules if rule["labels"]["severity"] == severity]
        yield f"- {severity}: {', '.join(f'[{name}](alerts.md#{name.lower()})' for name in names)}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
