"""What a cell has computed of a step."""

import torch

from bamboo_trainer.stage.stage import build_stage
from stage_kit import CONFIG, begin, microbatch, small_gpt


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
