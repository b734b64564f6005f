"""Generated recordings: seed, rates and refusals."""

from collections import Counter

import pytest

from bamboo.traces.generate import Generation, Pattern, generate
from bamboo.traces.summary import summarize
from bamboo.traces.trace import Change, NodeTraceError, removal_times


@pytest.mark.parametrize("pattern", list(Pattern))
def test_what_is_generated_follows_its_seed_and_its_rate(pattern: Pattern) -> None:
    wanted = Generation(
        pattern=pattern, nodes=60, hours=400, removal=0.1, addition=0.9, zones=("a", "b", "c"), notice=30.0
    )
    trace = generate(wanted, 1)
    assert trace == generate(wanted, 1) != generate(wanted, 2)
    found = summarize(trace)
    assert ({change.zone for change in trace.changes}, trace.duration, found.peak) == ({*"abc"}, 400 * 3600.0, 60)
    assert 0.08 < found.removals_per_node_hour < 0.13
    assert {change.notice for change in trace.changes if change.change is Change.REMOVE} == {30.0}
    assert (max(Counter(removal_times(trace)).values()) >= 10) is (pattern is Pattern.ZONES)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Generation(zones=("a", "a")), "--zones must name at least one zone, and each once"),
        (Generation(nodes=100_000, hours=1000), "--hours times the number of nodes must be at most 5000000"),
    ],
)
def test_what_cannot_be_generated_is_named(wanted: Generation, problem: str) -> None:
    with pytest.raises(NodeTraceError) as caught:
        generate(wanted, 1)
    assert str(caught.value).startswith(problem)
