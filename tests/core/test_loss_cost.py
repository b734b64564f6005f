"""What the loss of a worker has cost a job so far."""

from dataclasses import replace
from typing import Any

import pytest

from bamboo_core.coordinator import coordinator
from bamboo_core.coordinator.loss_cost import USUAL_PAUSE, loss_seconds
from bamboo_core.coordinator.state import CoordinatorState
from operator_kit import job, takeover


def begun(**spec: Any) -> CoordinatorState:
    return coordinator.initial(job(**spec), {}, secret="s", save_path=None, now=0.0)


def test_before_any_loss_it_is_a_usual_pause_and_half_of_the_time_until_another_worker_comes() -> None:
    assert loss_seconds(begun()) == pytest.approx(USUAL_PAUSE + 0.5 * 60)


def test_where_the_grid_is_chosen_the_others_train_on_until_then() -> None:
    state = begun(elastic={"objective": "Throughput", "maxWorkers": 10})
    assert loss_seconds(state) == pytest.approx(USUAL_PAUSE + 60 / 10)


def test_pauses_repeated_steps_and_replacements_are_those_that_there_were() -> None:
    state = begun()
    done = (
        takeover(decide_ms=0, reform_ms=100, recompute_ms=100),
        takeover(decide_ms=0, reform_ms=0, recompute_ms=400),
    )
    counts = replace(state.checkpoints.counts, repeated_seconds=90.0)
    state = replace(
        state,
        moves=replace(state.moves, takeovers=done),
        membership=replace(state.membership, preemptions=3),
        checkpoints=replace(state.checkpoints, counts=counts),
        grids=replace(state.grids, refills=(10.0, 20.0, 90.0)),
    )
    assert loss_seconds(state) == pytest.approx(0.3 + 30 + 0.5 * 20)
