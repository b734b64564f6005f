"""Writes the tables in docs/metrics.md from the table of metrics: `make docs`. A test fails if they are stale."""

from collections.abc import Iterator
from pathlib import Path

from bamboo.metrics import Exporter, Metric
from bamboo.metrics_table import TABLE

PAGE = Path(__file__).with_name("metrics.md")

BEGIN = "<!-- metrics: made by `make docs` from core/bamboo/metrics_table.py -->\n"
END = "<!-- end of metrics -->\n"

SECTIONS = (
    ("Jobs", "bamboo_job_", "Served by the operator; those marked *run* also by `bamboo run`."),
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
    tables = "\n".join(line for section in SECTIONS for line in _section(*section))
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def _section(title: str, prefix: str, text: str) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", "| Metric | Type | Labels | What |", "| --- | --- | --- | --- |")
    yield from (_row(metric) for metric in TABLE if metric.name.startswith(prefix))
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels if label not in ("namespace", "job"))
    text = metric.help
    if metric.by == (Exporter.RUN,):
        text += " *Only by run.*"
    elif Exporter.RUN in metric.by:
        text += " *run*"
    return f"| `{metric.name}` | {metric.kind}{f', {metric.unit}' if metric.unit else ''} | {labels} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
