"""Speeds of workers and times of layers, from the workers' measurements."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.coordinator.records.workers import Workers
from bamboo_core.coordinator.splits.worker_speeds import (
    LEAST_MICROBATCHES,
    estimate,
    measurements,
    owned_times,
)
from bamboo_core.coordinator.state import CoordinatorState
from bamboo_core.planning.plan import Cell
from bamboo_core.planning.splits.speeds import StageTimes, speeds
from slow_world import Slowed


def times(
    layers: tuple[int, int], *, backward: float = 2.0, count: int = LEAST_MICROBATCHES, **given: Any
) -> StageTimes:
    size = layers[1] - layers[0]
    known = {"each": (1.0 / size,) * size, "forward": 1.0, **given}
    return StageTimes(layers=layers, backward=backward, microbatches=count, **known)


def told(said: dict[int, StageTimes], stages: int = 3, **more: StageTimes) -> CoordinatorState:
    """Return the state of a job of one pipeline. said: times that stages' owners report, by stage. more: by worker."""
    world = Slowed(stages, 1, 0)
    world.settle_now()
    plan = world.state.current_plan
    workers = dict(world.state.workers)
    found = {plan.at(Cell(0, stage)).owner: one for stage, one in said.items()} | more
    for name, one in found.items():
        workers[name] = replace(workers[name], times=(one,))
    return replace(world.state, workers=Workers(workers))


def layers_of(stage: int) -> tuple[int, int]:
    world = Slowed(3, 1, 0)
    world.settle_now()
    return world.state.current_plan.stages[stage]


@pytest.mark.parametrize(
    "wrong", [{"count": LEAST_MICROBATCHES - 1}, {"forward": 0.0}, {"backward": 0.0}, {"each": (0.1,) * 99}]
)
def test_a_stage_counts_once_its_owner_has_measured_it_as_it_is(wrong: dict[str, Any]) -> None:
    layers = layers_of(1)
    assert set(owned_times(told({1: times(layers)}))) == {Cell(0, 1)}
    assert owned_times(told({1: times(layers, **wrong)})) == {}
    assert owned_times(told({1: times((layers[0], layers[1] + 1))})) == {}


def test_layers_share_what_their_stage_takes_and_data_stay_with_the_first_one() -> None:
    stages = [layers_of(s) for s in range(3)]
    read = times(stages[0], forward=1.5)  # half a second of its forward is in no layer
    state = told({0: read, 1: times(stages[1]), 2: times(stages[2])})
    found = estimate(state, speeds(measurements(state)))
    assert found is not None
    assert len(found.costs) == stages[-1][1]
    assert found.reading == pytest.approx((0.5, 0.0))
    assert [sum(found.costs[slice(*layers)]) for layers in stages] == pytest.approx([3.0, 3.0, 3.0])
