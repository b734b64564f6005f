"""What a simulated run comes to, whatever simulated it, and means over many runs. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields


class SimulationError(ValueError):
    """One sentence about why a run cannot be simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run.

    preemptions: nodes that were taken away. fatal: of these, how many were more than redundancy could bear.
    interval, lifetime: hours, means, between two preemptions and of all nodes. nodes, usd_per_hour: means over time.
    throughput: samples per second. value: samples per second for each USD per hour, a mean over the steps' time.
    hours: until the last step.
    """

    preemptions: int
    fatal: int
    interval: float
    lifetime: float
    nodes: float
    throughput: float
    usd_per_hour: float
    value: float
    hours: float
    steps: int


FIGURES = tuple(field.name for field in fields(Figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation of each figure over the runs, by its name; and the share of runs with a fatal one."""

    runs: int
    mean: dict[str, float]
    deviation: dict[str, float]
    fatal_share: float


def spread(runs: Sequence[Figures]) -> Spread:
    """Of at least one run. The deviation is that of the runs themselves, not an estimate for more of them."""
    rows = [asdict(run) for run in runs]
    columns = {name: [float(row[name]) for row in rows] for name in FIGURES}
    return Spread(
        runs=len(runs),
        mean={name: statistics.fmean(values) for name, values in columns.items()},
        deviation={name: statistics.pstdev(values) for name, values in columns.items()},
        fatal_share=sum(run.fatal > 0 for run in runs) / len(runs),
    )
