"""Means over many runs."""

from dataclasses import replace

from bamboo.simulation.figures import spread
from bamboo.simulation.research.cost_model import KnownBug
from research_kit import MINUTE, add, published, run


def test_value_as_a_mean_of_ratios_or_as_the_ratio_of_means() -> None:
    moments = [*add("a", "b"), *add("c", at=MINUTE)]
    with_bug, without = run(moments, 3), run(moments, 3, KnownBug.MEAN_OF_RATIOS)
    assert without.value == without.throughput / without.usd_per_hour != with_bug.value


def test_the_spread_of_runs_is_their_mean_and_deviation() -> None:
    one = published(0.01)
    found = spread([one, replace(one, preemptions=3, fatal=2)])
    assert (found.mean["preemptions"], found.deviation["preemptions"]) == (2, 1)
    assert (found.fatal_share, found.runs, found.deviation["value"]) == (0.5, 2, 0)
