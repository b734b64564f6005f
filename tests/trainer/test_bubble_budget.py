"""When a piece of redundant work fits into a bubble."""

import pytest

from bamboo_core.planning.plan import Cell
from bamboo_trainer.engine.steps.bubble_budget import MARGIN, PERIOD, SAFETY, SWITCHING_SECONDS, BubbleBudget

SLOT = (Cell(0, 1), 3)
STAGE, LAYER = 2, 5


def measured(*waits: float, cost: float | None = 0.010) -> BubbleBudget:
    budget = BubbleBudget()
    budget.restart(0)
    for wait in waits:
        budget.waited(SLOT, wait)
    if cost is not None:
        budget.ran_layer(STAGE, LAYER, cost)
    return budget


def test_the_second_and_third_step_of_an_epoch_and_every_nth_are_calibration() -> None:
    budget = BubbleBudget()
    budget.restart(7)
    measuring = [step for step in range(7 + 2 * PERIOD + 2) if budget.measures(step)]
    assert measuring == [8, 9, 7 + PERIOD, 7 + 2 * PERIOD]


@pytest.mark.parametrize("waits", [(), (1.0,)])
def test_nothing_fits_before_two_measurements(waits: tuple[float, ...]) -> None:
    assert not measured(*waits).fits(SLOT, 0.0, STAGE, LAYER)


def test_nothing_fits_if_no_cost_is_known() -> None:
    assert not measured(1.0, 1.0, cost=None).fits(SLOT, 0.0, STAGE, LAYER)


def test_nothing_fits_into_a_slot_that_does_not_wait() -> None:
    assert not measured(0.0, 0.0).fits(SLOT, 0.0, STAGE, LAYER)
    assert not measured(1.0, 1.0).fits((SLOT[0], SLOT[1] + 1), 0.0, STAGE, LAYER)


def test_it_fits_until_the_bubble_is_nearly_over() -> None:
    budget = measured(0.100, 0.100)
    latest = 0.100 * SAFETY - SWITCHING_SECONDS - 0.010 * MARGIN
    assert budget.fits(SLOT, latest - 1e-6, STAGE, LAYER)
    assert not budget.fits(SLOT, latest + 1e-6, STAGE, LAYER)


def test_the_smaller_of_the_last_two_measurements_counts() -> None:
    assert not measured(0.001, 0.100).fits(SLOT, 0.0, STAGE, LAYER)
    assert not measured(0.100, 0.001).fits(SLOT, 0.0, STAGE, LAYER)
    assert measured(0.001, 0.100, 0.100).fits(SLOT, 0.0, STAGE, LAYER)


def test_the_first_guess_of_a_cost_is_that_of_an_own_layer() -> None:
    budget = measured(0.100, 0.100, cost=None)
    budget.ran_forward(0.040, layers=4)
    assert budget.fits(SLOT, 0.080, STAGE, LAYER)
    assert not budget.fits(SLOT, 0.090, STAGE, LAYER)


def test_a_measured_cost_replaces_the_guess_and_follows_slowly() -> None:
    budget = measured(0.100, 0.100, cost=0.040)
    budget.ran_forward(0.004, layers=4)
    assert not budget.fits(SLOT, 0.060, STAGE, LAYER)
    budget.ran_layer(STAGE, LAYER, 0.001)
    assert not budget.fits(SLOT, 0.070, STAGE, LAYER)
    for _ in range(20):
        budget.ran_layer(STAGE, LAYER, 0.001)
    assert budget.fits(SLOT, 0.090, STAGE, LAYER)


def test_a_new_epoch_forgets_the_bubbles_and_keeps_the_costs() -> None:
    budget = measured(0.100, 0.100)
    budget.restart(20)
    assert not budget.fits(SLOT, 0.0, STAGE, LAYER)
    budget.waited(SLOT, 0.100)
    budget.waited(SLOT, 0.100)
    assert budget.fits(SLOT, 0.0, STAGE, LAYER)
