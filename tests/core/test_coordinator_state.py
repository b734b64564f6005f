"""A turn puts records in their places, and nothing else changes a state."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from bamboo_core.coordinator.replacing import Record
from bamboo_core.coordinator.state import Turn
from world import World


def test_a_record_is_put_in_its_place_and_the_others_stay() -> None:
    world = World(2, 1, 0)
    world.settle()
    state = world.state
    turn = Turn(state, world.now)
    progress, moves = replace(state.progress, step=7), replace(state.moves, recoveries=())
    turn.put(progress, moves)
    assert turn.state == replace(state, progress=progress, moves=moves)
    assert (turn.state.step, state.step) == (7, 1)
    with pytest.raises(FrozenInstanceError):
        state.progress = progress  # type: ignore[misc]


def test_each_record_has_a_place_of_its_own() -> None:
    state = World(2, 1, 0).state
    kinds = [type(getattr(state, one.name)) for one in fields(state)]
    assert len(set(kinds)) == len(kinds)
    assert all(issubclass(kind, Record) for kind in kinds)
