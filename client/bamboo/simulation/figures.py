"""Mean and deviation of figures over simulated runs; the error of a run that cannot be simulated. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


class SimulationError(ValueError):
    """Error of a run that cannot be simulated; the text is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation of each figure over the runs, by its name."""

    runs: int
    mean: dict[str, float]
    deviation: dict[str, float]


def spread(runs: Sequence[Any]) -> Spread:
    """Return the mean and deviation of each figure over at least one run.

    runs: dataclasses of numbers. The deviation is the population's (of these runs), not an estimate for further runs.
    """
    names = [field.name for field in fields(runs[0])]
    columns = {name: [float(getattr(run, name)) for run in runs] for name in names}
    return Spread(
        runs=len(runs),
        mean={name: statistics.fmean(values) for name, values in columns.items()},
        deviation={name: _deviation(values) for name, values in columns.items()},
    )


def _deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation; NaN, like the mean, if a value is NaN."""
    return math.nan if any(map(math.isnan, values)) else statistics.pstdev(values)
