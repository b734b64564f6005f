"""`strategies.costs`: the same step times and memory as the coordinator's, and the grids with the shortest steps."""

import pytest

from bamboo.profiles.files import read_profile
from bamboo_core.job.spec import PipelineSchedule
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.steps.grid_rates import GridRates
from strategies.comparison import published_job
from strategies.costs import StrategyRates
from strategy_kit import COSTS, costs_of, profile


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_step_takes_what_the_coordinator_expects_of_it(schedule: str) -> None:
    """With the job's schedule, `Costs` agrees with the coordinator's `GridRates` on step times and on fitting grids."""
    known = costs_of(profile(state=100, flow=1000.0), 8, schedule)
    rates = GridRates(known.profile.figures, known.spec, known.profile.machine.memory)
    by = PipelineSchedule(schedule)
    grids = [Grid(stages, pipelines, by) for stages in (1, 2, 3, 4) for pipelines in (1, 2)]
    assert [known.step(grid) for grid in grids] == [rates.seconds(grid) for grid in grids]
    assert [known.fits(grid) for grid in grids] == [rates.fits(grid) for grid in grids]


def test_where_the_coordinator_chooses_the_schedule_others_have_the_best_one_of_each_grid() -> None:
    """If the job names no schedule, each grid runs the fastest schedule that fits into memory."""
    free, plain, late = (costs_of(profile(), 8, schedule) for schedule in (None, "1F1B", "ZBH1"))
    for grid in (Grid(1, 2), Grid(3, 1), Grid(4, 2)):
        assert free.step(grid) == min(plain.step(grid), late.step(grid))
    assert free.step(Grid(4, 1)) < plain.step(Grid(4, 1))
    assert free.uneven((4, 2)) == min(plain.uneven((4, 2)), late.uneven((4, 2)))
    small = costs_of(profile(state=400), 8, None)
    assert [small.grid(4, stages).stages for stages in (1, 2, 3, 4)] == [0, 2, 3, 4]


def test_a_schedule_that_does_not_fit_into_memory_is_not_the_best_one() -> None:
    """Each of four layers keeps 10 bytes per microbatch in flight. ZBH1 is faster, but has more in flight than 1F1B."""
    free, plain, late = (costs_of(profile(activations=10, memory=40), 8, one) for one in (None, "1F1B", "ZBH1"))
    roomy, grid = costs_of(profile(), 8, "ZBH1"), Grid(2, 1)
    assert (free.fits(grid), plain.fits(grid), late.fits(grid)) == (True, True, False)
    assert free.step(grid) == plain.step(grid) > roomy.step(grid)
    assert free.uneven((2,)) == plain.uneven((2,)) > roomy.uneven((2,))


def test_lost_places_make_a_step_longer_by_what_their_peers_have_to_do() -> None:
    grid = Grid(4, 3)
    steps = [COSTS.rerouted(grid, least) for least in (3, 2, 1)]
    assert COSTS.step(grid) <= steps[0] <= steps[1] < steps[2]
    order = StageOrder.of(COSTS.spec.topology)
    alone = StrategyRates(COSTS.profile.figures, COSTS.spec).pipeline_ends(4, 8, order)
    assert steps[2] <= max(alone), "weight gradients are postponed"


def test_a_published_model_is_trained_with_microbatches_for_which_copies_fit() -> None:
    """With 12 stages BERT leaves room for a neighbour's stage in 16 GB if a microbatch has one sample, but not two."""
    assert published_job(read_profile("bert-v100")).spec.training.micro_batch_size == 1
    assert published_job(read_profile("vgg-v100")).spec.training.micro_batch_size == 8


def test_the_best_numbers_of_stages_are_those_of_the_fastest_grids() -> None:
    costs = costs_of(profile(6, state=10, flow=100.0, memory=45), batch=24)
    for nodes in range(1, 30):
        rates = {stages: costs.rate(costs.grid(nodes, stages)) for stages in range(1, 7)}
        ordered = sorted((stages for stages in rates if rates[stages]), key=rates.__getitem__, reverse=True)
        assert [stages for stages in rates if costs.fills(nodes, stages)] == sorted(ordered)
        for count in (1, 3, 10):
            assert costs.best_stages(nodes, range(1, 7), count) == ordered[:count]


def test_long_pipelines_of_equal_lengths_take_as_long_as_their_grid() -> None:
    costs = published_job(read_profile("bert-v100")).place.costs
    assert costs.uneven((14, 14)) == pytest.approx(costs.step(Grid(14, 2)))


@pytest.mark.parametrize("memory", [30, 1000])
def test_the_best_lengths_are_those_of_the_shortest_step(memory: int) -> None:
    costs = costs_of(profile(6, state=10, flow=100.0, memory=memory), batch=24)
    for nodes in range(1, 25):
        rates: dict[tuple[int, ...], float] = {(): 0.0}
        for count in range(2, nodes // 2 + 1):
            whole = min(nodes, 4 * count)
            for used in (whole - whole % count, whole):
                lengths = tuple(used // count + (place < used % count) for place in range(count))
                if all(costs.fits(Grid(length, count)) for length in lengths):
                    rates[lengths] = 1 / costs.uneven(lengths)
        assert costs.best_lengths(nodes, 2, 4, 2) == max(rates, key=rates.__getitem__)
