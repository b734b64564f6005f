"""Runs of strategies over time: the nodes that a job holds, the reactions, and the resulting figures."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Change, NodeChange, PriceChange, make_trace
from bamboo_core.planning.splits.resplit_plans import Grid
from strategies.choose import SPOT, Setting
from strategies.drive import drive
from strategies.fixed_grids import Standing, kept_seconds, standings
from strategies.policy import Reaction, Saving, View, blocking
from strategies.restarting import Restarting
from strategies.timeline import Timeline, timeline
from strategy_kit import START, costs_of, nodes, profile, run

LOSING = costs_of(profile(6, state=10, flow=100.0), batch=24)


def test_nodes_are_held_up_to_the_capacity_and_paid_while_they_are_held() -> None:
    """Node c replaces a at 100 s. Node d replaces b at 300 s, but is gone before it is ready."""
    changes = [
        NodeChange(at=at, change=change, node=node)
        for at, change, node in (
            (0.0, Change.ADD, "a"),
            (0.0, Change.ADD, "b"),
            (50.0, Change.ADD, "c"),
            (100.0, Change.REMOVE, "a"),
            (200.0, Change.REMOVE, "b"),
            (300.0, Change.ADD, "d"),
            (305.0, Change.REMOVE, "d"),
        )
    ]
    found = timeline(make_trace(changes, duration=400.0), capacity=2, start=10.0, usd_per_hour=3600.0)
    assert [(one.at, one.joined, one.lost) for one in found.changes] == [
        (10.0, ("a", "b"), ()),
        (100.0, (), ("a",)),
        (110.0, ("c",), ()),
        (200.0, (), ("b",)),
    ]
    assert (found.node_seconds, found.usd, found.removed) == pytest.approx((605.0, 605.0, 3))
    prices = [PriceChange(at=0.0, zone="", usd_per_hour=3600.0), PriceChange(at=150.0, zone="", usd_per_hour=7200.0)]
    priced = timeline(make_trace(changes, prices, duration=400.0), capacity=2, start=10.0, usd_per_hour=0.0)
    assert priced.usd == pytest.approx(605.0 + 50 + 250 + 5)


class Scripted:
    """A policy that returns the given reactions in turn, and records the views that it gets."""

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


def losing(seed: int, removal: float, count: int = 12) -> Timeline:
    trace = generate(Generation(nodes=count, hours=4, removal=removal, addition=0.9), seed)
    return timeline(trace, capacity=count, start=START, usd_per_hour=1.0)


def fixed(grid: Grid, mtbf: float) -> Restarting:
    saving = blocking(LOSING, grid.stages, mtbf)
    return Restarting(costs=LOSING, choices=(grid.stages,), saving=saving, mtbf=mtbf, fixed=grid)


def test_a_grid_stands_until_one_of_its_own_nodes_is_lost() -> None:
    seen = nodes((0, "a b", ""), (10, "c", ""), (20, "", "c"), (30, "d", ""), (40, "", "a"), (50, "", "b"), duration=90)
    assert standings(seen, [1, 2, 3]) == {
        1: [Standing(0, 40, True, False), Standing(40, 50, True, True), Standing(50, 90, False, True)],
        2: [Standing(0, 40, True, False), Standing(40, 50, True, True)],
        3: [Standing(10, 20, True, False), Standing(30, 40, True, False)],
    }


@given(seed=st.integers(1, 1000), removal=st.floats(0.0, 0.9), stages=st.integers(1, 6), pipelines=st.integers(1, 6))
def test_the_account_of_restarts_is_what_the_whole_run_comes_to(
    seed: int, removal: float, stages: int, pipelines: int
) -> None:
    seen, grid = losing(seed, removal), Grid(stages, pipelines)
    one = fixed(grid, mtbf=300.0)
    kept = kept_seconds(standings(seen, [grid.cells])[grid.cells], one.saving, LOSING.restart(stages), LOSING.detection)
    assert drive(one, seen).samples == pytest.approx(kept * LOSING.rate(grid), rel=1e-6, abs=1e-3)


@given(seed=st.integers(1, 1000), removal=st.floats(0.0, 0.9))
def test_of_all_fixed_grids_the_best_one_is_driven(seed: int, removal: float) -> None:
    seen = losing(seed, removal)
    setting = Setting(costs=LOSING, nodes=12, usual=10, mtbf=300.0, spot=seen)
    every = [Grid(stages, d) for stages in setting.tried for d in range(1, 12 // stages + 1)]
    most = max(drive(fixed(grid, setting.mtbf), seen).samples for grid in every if LOSING.fits(grid))
    driven = [drive(one, seen).samples for one in SPOT["torchrun-fixed"](setting)]
    assert max(driven, default=0.0) == most
