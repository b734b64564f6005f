"""Grids that nobody changes: what an account of restarts says is what driving them through all changes comes to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo.simulation.strategies.choose import SPOT, Setting
from bamboo.simulation.strategies.drive import drive
from bamboo.simulation.strategies.fixed_grids import Standing, kept_seconds, standings
from bamboo.simulation.strategies.policies.restarting import Restarting
from bamboo.simulation.strategies.saving import blocking
from bamboo.simulation.strategies.timeline import Timeline, timeline
from bamboo.traces.generate import Generation, generate
from bamboo_core.planning.splits.resplit import Grid
from strategy_kit import START, costs_of, nodes, profile

COSTS = costs_of(profile(6, state=10, flow=100.0), batch=24)


def losing(seed: int, removal: float, count: int = 12) -> Timeline:
    trace = generate(Generation(nodes=count, hours=4, removal=removal, addition=0.9), seed)
    return timeline(trace, capacity=count, start=START, usd_per_hour=1.0)


def policy(grid: Grid, mtbf: float) -> Restarting:
    saving = blocking(COSTS, grid.stages, mtbf)
    return Restarting(costs=COSTS, choices=(grid.stages,), saving=saving, mtbf=mtbf, fixed=grid)


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
    one = policy(grid, mtbf=300.0)
    kept = kept_seconds(standings(seen, [grid.cells])[grid.cells], one.saving, COSTS.restart(stages), COSTS.detection)
    assert drive(one, seen).samples == pytest.approx(kept * COSTS.rate(grid), rel=1e-6, abs=1e-3)


@given(seed=st.integers(1, 1000), removal=st.floats(0.0, 0.9))
def test_of_all_fixed_grids_the_best_one_is_driven(seed: int, removal: float) -> None:
    seen = losing(seed, removal)
    setting = Setting(costs=COSTS, nodes=12, usual=10, mtbf=300.0, spot=seen)
    every = [Grid(stages, d) for stages in setting.tried for d in range(1, 12 // stages + 1)]
    most = max(drive(policy(grid, setting.mtbf), seen).samples for grid in every if COSTS.fits(grid))
    driven = [drive(one, seen).samples for one in SPOT["torchrun-fixed"](setting)]
    assert max(driven, default=0.0) == most
