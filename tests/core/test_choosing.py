"""Measurements from which the coordinator chooses the grid."""

from dataclasses import replace

import pytest

from bamboo_core.coordinator.grids.choosing import rates_of
from bamboo_core.coordinator.records.grids import GridState
from bamboo_core.coordinator.records.workers import Workers
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.profile import LayerBytes
from bamboo_core.planning.splits.speeds import StageTimes
from slow_world import trained


def measured(state: CoordinatorState, forward: float, backward: float) -> CoordinatorState:
    """Return the state with these seconds as every stage's reported times, and their sum as every layer's cost."""
    workers = {
        name: replace(
            record,
            times=tuple(
                StageTimes(layers=one.layers, forward=forward, backward=backward, microbatches=one.microbatches)
                for one in record.times
            ),
        )
        for name, record in state.workers.items()
    }
    costs = (forward + backward,) * state.current_plan.stages[-1][1]
    return replace(state, workers=Workers(workers), grids=replace(state.grids, costs=costs))


@pytest.mark.parametrize("memory", [None, 1000])
def test_sizes_of_layers_that_become_known_count_at_once(memory: int | None) -> None:
    """`rates_of` makes new rates once workers have reported the layers' sizes, and then keeps them."""
    state = measured(trained(4, 1, 0).state, 1.0, 1.0)
    before = rates_of(replace(state, layers=replace(state.layers, sizes=(), memory=memory)))
    size = LayerBytes(parameters=1, optimizer=2, gradients=3, activations=4, boundary=5)
    sizes = (size,) * len(state.layers.costs or ())
    layers = replace(state.layers, sizes=sizes, memory=memory)
    rates = rates_of(replace(state, layers=layers, grids=replace(state.grids, rates=before)))
    assert rates is not None
    assert [layer.optimizer for layer in rates.figures.layers] == [2] * len(sizes)
    again = replace(state, layers=layers, grids=replace(state.grids, rates=rates))
    assert rates_of(again) is rates


def test_how_long_a_replacement_takes_does_not_count_from_a_loss_that_nobody_replaced() -> None:
    """`refills`, seconds from a loss to its replacement, leaves out the first loss, which is never replaced."""
    known = GridState(workers=8).noted(7, 0.0, wanted=7)
    for number in range(1, 4):
        lost = known.noted(6, 18_000.0 * number, wanted=7)
        known = lost.noted(7, 18_000.0 * number + 60, wanted=7)
    assert (known.refills, known.gaps) == ((60.0, 60.0, 60.0), ())


def test_who_is_missed_by_many_is_replaced_in_the_order_of_the_losses() -> None:
    known = GridState(workers=8).noted(7, 0.0, wanted=8).noted(6, 50.0, wanted=8)
    known = known.noted(7, 100.0, wanted=8).noted(8, 120.0, wanted=8)
    assert known.refills == (100.0, 70.0)
