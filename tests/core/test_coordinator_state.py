"""A turn puts records in their places, and nothing else changes a state."""

from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from bamboo.coordinator.state import Record, Turn, changed
from world import World


def test_a_record_is_put_in_its_place_and_the_others_stay() -> None:
    world = World(2, 1, 0)
    world.settle()
    state = world.state
    turn = Turn(state, world.now)
    progress, moves = replace(state.progress, step=7), state.moves.forgotten()
    turn.put(progress, moves)
    assert turn.state == replace(state, progress=progress, moves=moves)
    assert (turn.state.step, state.step) == (7, 1)
    with pytest.raises(FrozenInstanceError):
        state.progress = progress  # type: ignore[misc]


def test_each_record_has_a_place_of_its_own() -> None:
    state = World(2, 1, 0).state
    kinds = [type(value) for value in vars(state).values()]
    assert all(kinds.count(kind) == 1 for kind in get_args(Record))


def test_a_state_is_changed_as_a_dataclass_is_replaced() -> None:
    state = World(2, 1, 0).state
    assert changed(state, {"membership": state.membership.without("w")}) == replace(
        state, membership=replace(state.membership, gone=frozenset({"w"}))
    )
    with pytest.raises(TypeError, match="CoordinatorState has no stepp"):
        changed(state, {"stepp": 7})
