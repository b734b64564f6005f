"""Parameters as views of one flat buffer, rounded or not."""

from dataclasses import replace

import torch

from bamboo_trainer.stage.stage import build_stage
from precision_kit import build
from stage_kit import ROUNDED, begin, microbatch

UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


def test_gradients_are_summed_in_fp32_and_updates_are_rounded() -> None:
    stage = build_stage(build({}), 0, [(0, 4)], UNCLIPPED)
    work = begin(stage, 0, 1, 2)
    for index in range(3):
        microbatch([stage], [work], 0, index)
    total = work.gradients.total()
    assert total.dtype == torch.float32
    each = []
    for index in range(3):
        one = stage.begin([index], [index, index + 1])
        microbatch([stage], [one], 0, index)
        each.append(one.gradients.total().clone())
    marks = [slot.mark for slot in stage.values.parameters.slots]
    for sums in (total, *each):
        sums[marks] = 0
    assert torch.equal(total, each[0] + each[1] + each[2])
    assert not torch.equal(total, total.bfloat16().float()), "the sum has more digits than bf16"
    assert all(torch.equal(one, one.bfloat16().float()) for one in each), "a microbatch's gradient is that of bf16"
