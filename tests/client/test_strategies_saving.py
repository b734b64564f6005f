"""How often checkpoints are taken."""

import pytest

from bamboo.simulation.strategies.costs import SNAPSHOT_BYTES
from bamboo.simulation.strategies.saving import blocking, pays, young_daly
from strategy_kit import costs_of, profile


def test_a_blocking_checkpoint_pauses_until_it_is_stored() -> None:
    """A state of 3 GB at 1 GB/s: three seconds, in place of one from the device to memory."""
    costs = costs_of(profile(state=int(SNAPSHOT_BYTES), flow=1e9, memory=10**11), 8)
    saving = blocking(costs, 4, 600.0)
    assert (saving.every, saving.pause, saving.delay) == pytest.approx((60.0, 3.0, 0.0))


def test_checkpoints_by_young_and_daly() -> None:
    costs = costs_of(profile(state=int(SNAPSHOT_BYTES), flow=1e9, memory=10**11), 8)
    saving = young_daly(costs, 4, 200.0)
    assert (saving.every, saving.pause, saving.delay) == pytest.approx((20.0, 1.0, 3.0))
    assert young_daly(costs, 1, 1.0).every == pytest.approx(12.0)  # not more often than it can be written
    assert pays(1.0, 2.0, 10.0, 21.0)
    assert not pays(1.0, 2.0, 10.0, 19.0)
