"""What a cell has computed of a step."""

import torch
from torch import nn

from bamboo_trainer.stage.stage import build_stage
from stage_kit import CONFIG, begin, chain, microbatch, small_gpt, small_task


def test_backwards_of_two_works_do_not_mix(tmp_path):
    stage = build_stage(small_gpt(tmp_path), 0, [(0, 4)], CONFIG)
    alone, other, mixed = begin(stage), begin(stage), begin(stage)
    for index in (0, 1):
        microbatch([stage], [alone], 0, index)
    for index in (0, 1):
        microbatch([stage], [mixed], 0, index)
        microbatch([stage], [other], 1, index)
    assert torch.equal(alone.gradients.target, mixed.gradients.target)
    assert not torch.equal(alone.gradients.target, other.gradients.target)


class WithCount(nn.Module):
    def forward(self, x):
        return x * 2, torch.arange(len(x)), x


class Ignoring(nn.Module):
    def forward(self, parts):
        return parts[0] + parts[1][:, None]


def test_neither_integer_parts_nor_unused_parts_have_a_gradient():
    task = small_task(layers=(lambda: nn.Linear(2, 2), WithCount, Ignoring))
    stages = chain(task, [(0, 1), (1, 2), (2, 3)])
    crossed = microbatch(stages, [begin(s) for s in stages], 0, 0)
    assert len(crossed[1]) == 3
    assert len(crossed[3]) == 2
    assert crossed[3][0] is not None
    assert crossed[3][1] is None
    torch.testing.assert_close(crossed[4][0], 2 * crossed[3][0])
