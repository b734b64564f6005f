"""A chain of stages in one process against plain PyTorch; the bits of repeated work."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bamboo_trainer import reference
from bamboo_trainer.models import mlp
from bamboo_trainer.stage import Stage
from stage_kit import CONFIG, SPLITS, chain, microbatch, one_step, small_gpt, small_task, state_of


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-3)])
def test_a_chain_of_stages_trains_like_plain_pytorch(tmp_path, stages, tied, precision, tolerance):
    """To the bit; the gradient of parameters tied over stages is summed in another order, hence a tolerance."""
    config = replace(CONFIG, precision=precision, max_gradient_norm=None)
    task = small_gpt(tmp_path, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, config, 6)
    parts = chain(task, SPLITS[stages], config)
    if tied and stages > 1:
        assert [one_step(parts, k, config) for k in range(6)] == pytest.approx(losses, rel=tolerance)
        torch.testing.assert_close(state_of(parts), state, rtol=tolerance, atol=tolerance)
    else:
        assert [one_step(parts, k, config) for k in range(6)] == losses
        torch.testing.assert_close(state_of(parts), state, rtol=0, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_clipping_uses_the_norm_over_all_stages(tmp_path, stages, tied):
    """Our norm is summed in fp64 and PyTorch's in fp32, so the last bits differ."""
    task = small_gpt(tmp_path, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=0)
    task = replace(task, optimizer=lambda named: torch.optim.SGD(named, momentum=0.9))
    losses, state = reference.train(task, CONFIG, 6)
    parts = chain(task, SPLITS[stages])
    assert [one_step(parts, k) for k in range(6)] == pytest.approx(losses, rel=2e-5)
    torch.testing.assert_close(state_of(parts), state, rtol=2e-5, atol=1e-6)
    unclipped, _ = reference.train(task, replace(CONFIG, max_gradient_norm=None), 6)
    assert unclipped != pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("split", [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]])
def test_layers_may_pass_tuples(split):
    task = mlp.build({"width": 8, "blocks": 2, "samples": 64})
    losses, state = reference.train(task, CONFIG, 5)
    stages = chain(task, split)
    assert [one_step(stages, k) for k in range(5)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)


def test_tied_stages_stay_equal_and_count_once(tmp_path):
    stages = chain(small_gpt(tmp_path, tieEmbeddings=True), SPLITS[4])
    assert [len(s.tied_segments()) for s in stages] == [1, 0, 0, 1]
    assert stages[0].tied_segments()[0].stages == (0, 3)
    ones = [torch.ones(s.size) for s in stages]
    assert (
        sum(s.norm_squared(g) for s, g in zip(stages, ones, strict=True))
        == sum(t.numel() for t in state_of(stages).values()) - 256 * 16
    )
    for k in range(3):
        one_step(stages, k)
    state = state_of(stages)
    assert torch.equal(state["layers.0.token.weight"], state["layers.3.head.weight"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_repeated_microbatch_has_the_same_bits_on_another_holder(tmp_path, precision):
    config = replace(CONFIG, precision=precision)
    task = small_gpt(tmp_path, dropout=0.2)
    one, two = chain(task, SPLITS[2], config), chain(task, SPLITS[2], config)
    works, again = [s.begin() for s in one], [s.begin() for s in two]
    first = microbatch(one, works, 5, 1)
    torch.rand(17)  # whatever else drew random numbers
    two[0].forward(again[0], 5, 1, None)  # a redundant forward
    second = microbatch(two, again, 5, 1)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(works, again, strict=True))
    assert works[-1].losses == again[-1].losses


def test_backwards_of_two_works_do_not_mix(tmp_path):
    stage = Stage(small_gpt(tmp_path), 0, [(0, 4)], CONFIG)
    alone, other, mixed = stage.begin(), stage.begin(), stage.begin()
    for index in (0, 1):
        microbatch([stage], [alone], 0, index)
    for index in (0, 1):
        microbatch([stage], [mixed], 0, index)
        microbatch([stage], [other], 1, index)
    assert torch.equal(alone.gradient, mixed.gradient)
    assert not torch.equal(alone.gradient, other.gradient)


def test_the_gradient_given_to_apply_is_not_modified():
    stage = Stage(small_task(), 0, [(0, 3)], CONFIG)
    gradient = torch.ones(stage.size)
    stage.apply(gradient, 100.0)
    assert torch.equal(gradient, torch.ones(stage.size))


class WithCount(nn.Module):
    def forward(self, x):
        return x * 2, torch.arange(len(x)), x


class Ignoring(nn.Module):
    def forward(self, parts):
        return parts[0] + parts[1][:, None]


def test_integer_parts_have_no_gradient_and_unused_parts_zeros():
    task = small_task(layers=(lambda: nn.Linear(2, 2), WithCount, Ignoring))
    stages = chain(task, [(0, 1), (1, 2), (2, 3)])
    crossed = microbatch(stages, [s.begin() for s in stages], 0, 0)
    assert len(crossed[1]) == 3
    assert len(crossed[3]) == 2
    assert torch.equal(crossed[3][1], torch.zeros(2, 2))
    torch.testing.assert_close(crossed[4][0], 2 * crossed[3][0])
