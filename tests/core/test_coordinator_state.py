"""A state is changed as a dataclass is replaced."""

from dataclasses import FrozenInstanceError, replace

import pytest

from bamboo.coordinator.state import changed
from world import World


def test_a_state_is_changed_as_a_dataclass_is_replaced() -> None:
    world = World(2, 1, 0)
    world.settle()
    state = world.state
    assert changed(state, {"step": 7, "gone": frozenset({"w"})}) == replace(state, step=7, gone=frozenset({"w"}))
    assert state.step != 7
    with pytest.raises(TypeError, match="CoordinatorState has no stepp"):
        changed(state, {"stepp": 7})
    with pytest.raises(FrozenInstanceError):
        state.step = 7  # type: ignore[misc]
