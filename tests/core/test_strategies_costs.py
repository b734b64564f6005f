"""What a step and a stage's state cost on a grid."""

import pytest

from bamboo.planning.splits.resplit import Grid
from bamboo.simulation.strategies.costs import Costs
from strategy_kit import COSTS, profile


def test_a_step_is_a_pipelines_fill_and_its_microbatches() -> None:
    """1x2: (8 + 1) x 2 s; 2x2: (4 + 1) x 2 s; a doubled stage does 4 x 2 microbatches; 3 pipelines: ceil(8/3)."""
    assert [COSTS.step(Grid(2, count)) for count in (1, 2, 3)] == pytest.approx([18, 10, 8])
    assert COSTS.step(Grid(2, 2), 2.0) == pytest.approx(8 * 2 + 2)
    assert COSTS.rate(Grid(0, 0)) == 0


def test_pipelines_of_different_length_end_together() -> None:
    """4 stages of 1 s and 2 of 2 s: of 8 microbatches 5 and 3 end after 8 s both."""
    assert COSTS.uneven((4, 2)) == pytest.approx(8)
    assert COSTS.uneven((2, 2)) == pytest.approx(COSTS.step(Grid(2, 2)))


def test_what_the_network_carries_is_part_of_a_step() -> None:
    """2 pipelines of one stage: each sends and receives 2 x 1/2 of 400 bytes of gradients at 100 bytes a second."""
    layer = profile().layers[0]
    from msgspec.structs import replace

    layers = (replace(layer, gradients=100),) * 4
    costs = Costs(replace(profile(flow=100.0), layers=layers), 8)
    assert costs.step(Grid(1, 2)) == pytest.approx(4 * 4 + 4)
    assert costs.step(Grid(4, 1), replicas=True) == pytest.approx(11)
    assert Costs(replace(profile(flow=5.0), layers=layers), 8).step(Grid(4, 1), replicas=True) == pytest.approx(100 / 5)


def test_the_memory_of_a_device_bounds_the_stages() -> None:
    costs = Costs(profile(state=400), 8)
    assert (costs.least_stages(), costs.least_stages(2)) == (2, 4)
    assert Costs(profile(state=2000), 8).least_stages() is None
