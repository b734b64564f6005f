"""Random numbers that nobody seeds are recorded."""

import cProfile
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bamboo_trainer.engine.steps.spot_checks import forward_by_layer
from bamboo_trainer.stage.stage import build_stage
from determinism_kit import between
from stage_kit import CONFIG, begin


class SeldomByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.random.uniform() < 1e-12 else x


def drawn(layer: type[nn.Module]) -> str:
    """What the layer draws from, in each of two forwards."""
    stage = build_stage(between(layer), 0, [(0, 3)], CONFIG)
    draws = stage.draws()
    for _ in range(2):
        forward_by_layer(stage, begin(stage), (0, 0), None, draws=draws)
    assert not draws[0].each_time()
    return draws[1].each_time()


def test_numpys_generator_may_be_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        assert (drawn(nn.Tanh), drawn(SeldomByNumpy)) == ("", "numpy.random")
    finally:
        np.random.set_bit_generator(before)


def test_a_profiler_that_runs_already_stays() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        drawn(nn.Tanh)
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()


def test_nothing_is_recorded_of_a_layer_that_raises() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    with pytest.raises(ValueError, match="RuntimeError"):
        drawn(Raises)
    assert sys.getprofile() is None
    assert torch.is_grad_enabled()
