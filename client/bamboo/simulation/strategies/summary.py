"""Several runs of a strategy as one line of a table. Pure."""

import statistics
from collections.abc import Sequence

from bamboo.simulation.figures import Spread
from bamboo.simulation.strategies.drive import StrategyResult
from bamboo.simulation.strategies.timeline import HOUR
from bamboo_core.prices.zone_traffic import GB


def spread_of(outcomes: Sequence[StrategyResult]) -> Spread:
    """Means and standard deviations, of at least one run."""
    columns = {
        "preemptions": [float(one.preemptions) for one in outcomes],
        "nodes": [one.nodes for one in outcomes],
        "throughput": [one.throughput for one in outcomes],
        "usd_per_hour": [one.usd_per_hour for one in outcomes],
        "zone_gb_per_hour": [one.crossed / GB / (one.duration / HOUR) for one in outcomes],
        "zone_usd_per_hour": [one.zone_usd / (one.duration / HOUR) for one in outcomes],
        "value": [one.value for one in outcomes],
        "goodput": [one.goodput for one in outcomes],
        "redone": [one.redone / one.duration for one in outcomes],
        "stalled": [one.stalled / one.duration for one in outcomes],
        "idle": [one.idle / one.duration for one in outcomes],
        "saving": [one.saving / one.duration for one in outcomes],
        "hours": [one.duration / HOUR for one in outcomes],
    }
    return Spread(
        runs=len(outcomes),
        mean={name: statistics.fmean(values) for name, values in columns.items()},
        deviation={name: statistics.pstdev(values) for name, values in columns.items()},
        fatal_share=0.0,
    )
