"""Traces of nodes as a table and as JSON. Pure."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from bamboo.terminal.tables import plain_table
from bamboo.traces.summary import NodeTraceSummary, removals_by_hour
from bamboo.traces.trace import Trace
from bamboo_core.text import printable

MOST_ZONES = 8
MOST_BARS = 48
BLOCKS = " ▁▂▃▄▅▆▇█"


def trace_table(trace: Trace, summary: NodeTraceSummary) -> Table:
    """Return a table of the trace's figures, with removals per hour as bars."""
    shown = plain_table("", "", header=False)
    zones = [printable(zone) for zone in summary.zones]
    rest = f" and {len(zones) - MOST_ZONES} more" if len(zones) > MOST_ZONES else ""
    rows = [
        ("source", printable(trace.source)),
        ("duration", _hours(summary.duration)),
        ("nodes", f"{summary.mean_nodes:.2f} on average, {summary.peak} at most, {summary.node_hours:.1f} node hours"),
        ("zones", ", ".join(zones[:MOST_ZONES]) + rest if zones else "not known"),
        ("added, removed", f"{summary.added}, {summary.removed}"),
        (
            "removals",
            f"{summary.removals_per_hour:.2f} per hour, {summary.removals_per_node_hour:.3f} per node hour;"
            f" at {summary.removal_instants} instants, at most {summary.largest_batch} at once",
        ),
    ]
    if summary.mean_lifetime is not None and summary.median_lifetime is not None:
        mean, median = _hours(summary.mean_lifetime), _hours(summary.median_lifetime)
        rows.append(("lifetime", f"{mean} on average, {median} median, of nodes that were removed"))
    if summary.usd_per_hour is not None:
        rows.append(("price", f"{summary.usd_per_hour:.4f} USD per node hour on average"))
    elif trace.prices:
        rows.append(("price", f"{len(trace.prices)} prices, not of all nodes' zones"))
    if summary.removed:
        rows.append(("removals by hour", bars(removals_by_hour(trace))))
    for name, value in rows:
        shown.add_row(name, value)
    return shown


def trace_document(trace: Trace, summary: NodeTraceSummary) -> dict[str, Any]:
    """Return a trace's summary as JSON values: figures, seconds and rates, and the removals in each hour."""
    return {
        "source": trace.source,
        **asdict(summary),
        "prices": len(trace.prices),
        "removals_by_hour": list(removals_by_hour(trace)),
    }


def bars(values: tuple[int, ...]) -> str:
    """Return a bar chart: a character per value, or beyond MOST_BARS per mean of several. The largest bar is full."""
    width = -(-len(values) // MOST_BARS)
    groups = [values[start : start + width] for start in range(0, len(values), width)]
    means = [sum(group) / len(group) for group in groups]
    most = max(means) or 1.0
    return "".join(BLOCKS[round(mean / most * (len(BLOCKS) - 1))] for mean in means)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h"
