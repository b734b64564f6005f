"""Time goes by: a strategy's reactions to a timeline, and what they come to."""

from typing import Any

import pytest

from bamboo.simulation.strategies.policy import Reaction, Saving, View
from bamboo.simulation.strategies.summary import spread_of
from strategy_kit import run


class Scripted:
    """Reacts with these, one after the other, and keeps what it was told."""

    def __init__(self, *reactions: Reaction | None, saving: Saving | None = None) -> None:
        self.reactions, self.saving, self.views = list(reactions), saving, list[View]()

    def begin(self) -> int:
        return 0

    def react(self, state: Any, view: View) -> tuple[Any, Reaction | None]:
        assert state == len(self.views)
        self.views.append(view)
        return state + 1, self.reactions[state]


def test_nodes_come_and_go_and_samples_follow_the_rate() -> None:
    policy = Scripted(Reaction(rate=2.0), Reaction(rate=1.0, stall=4.0), None)
    found = run(policy, (10.0, "a b", ""), (20.0, "", "b"), (40.0, "c", ""), duration=50.0)
    assert [view.ready for view in policy.views] == [("a", "b"), ("a",), ("a", "c")]
    assert (found.idle, found.stalled, found.samples) == (10.0, 4.0, 20.0 + 26.0)
    assert found.goodput == pytest.approx(36 / 50)


def test_what_is_lost_is_trained_again() -> None:
    some = Scripted(Reaction(rate=2.0), Reaction(rate=2.0, redo=6.0))
    found = run(some, (0.0, "a", ""), (10.0, "", "a"), duration=20.0)
    assert (found.samples, found.redone) == (34.0, 3.0)
    everything = Scripted(
        Reaction(rate=2.0), Reaction(rate=2.0, redo=None), saving=Saving(every=4.0, pause=0.0, delay=0.0)
    )
    found = run(everything, (0.0, "a", ""), (10.0, "", "a"), duration=20.0)
    assert (found.samples, found.redone) == (36.0, 2.0), "since the checkpoint after 8 s"


def test_a_checkpoint_is_of_use_only_when_it_is_safe_and_its_pauses_count() -> None:
    late = Scripted(Reaction(rate=2.0), Reaction(rate=2.0, redo=None), saving=Saving(every=4.0, pause=0.0, delay=3.0))
    assert run(late, (0.0, "a", ""), (10.0, "", "a"), duration=20.0).redone == 6.0
    pausing = Scripted(Reaction(rate=1.0), saving=Saving(every=4.0, pause=1.0, delay=0.0))
    assert run(pausing, (0.0, "a", ""), duration=20.0).saving == pytest.approx(4.0)


def test_a_strategy_is_asked_again_when_it_wants() -> None:
    policy = Scripted(Reaction(rate=0.0, wake=5.0), Reaction(rate=3.0))
    assert run(policy, (2.0, "a", ""), duration=10.0).samples == pytest.approx(9.0)
    assert [view.now for view in policy.views] == [2.0, 7.0]
    earlier = Scripted(Reaction(rate=0.0, wake=5.0), Reaction(rate=1.0))
    run(earlier, (2.0, "a", ""), (4.0, "b", ""), duration=10.0)
    assert [view.now for view in earlier.views] == [2.0, 4.0], "the earlier wish is forgotten"


def test_several_runs_are_means_and_deviations() -> None:
    results = [run(Scripted(Reaction(rate=rate)), (0.0, "a", ""), duration=10.0) for rate in (1.0, 3.0)]
    found = spread_of(results)
    assert (found.runs, found.mean["throughput"], found.deviation["throughput"]) == (2, 2.0, 1.0)
    assert found.mean["idle"] == 0.0
