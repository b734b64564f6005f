"""Mean and deviation of the figures of several runs."""

import math
from dataclasses import dataclass

from bamboo.simulation.figures import spread


@dataclass(frozen=True)
class Run:
    """The figures of one run, in place of a simulated run's."""

    preemptions: int
    usd: float = 1.0


def test_the_spread_of_runs_is_their_mean_and_deviation() -> None:
    found = spread([Run(1), Run(3)])
    assert (found.mean["preemptions"], found.deviation["preemptions"]) == (2, 1)
    assert (found.runs, found.deviation["usd"]) == (2, 0)
    assert math.isnan(spread([Run(1), Run(1, usd=math.nan)]).deviation["usd"])
