"""Parameters in bf16: half the memory of a stage's state, and checkpoints that other splits restore."""

from dataclasses import replace

import pytest
import torch

from bamboo_core.control.digests import add_digests
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.stage.stage import build_stage
from precision_kit import build
from stage_kit import ROUNDED, chain, one_step, state_bytes, whole_state

UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


def test_the_state_is_half_as_large_and_moves_to_other_splits_in_checkpoints() -> None:
    task = build({})
    whole = build_stage(task, 0, [(0, 4)], replace(UNCLIPPED, precision="fp32", parameter_precision="fp32"))
    stages = chain(task, [(0, 2), (2, 4)], UNCLIPPED)
    for step in range(2):
        one_step(stages, step, UNCLIPPED)
    counts = 4 * sum(len(stage.values.parameters.slots) for stage in stages)  # of steps, one number for each parameter
    halves = [state_bytes(stage) for stage in stages]
    assert 2 * sum(held for held, _ in halves) == state_bytes(whole)[0]
    assert 2 * (sum(state for _, state in halves) - counts) == state_bytes(whole)[1] - counts
    files = {i: b"".join(encode(state)) for stage in stages for i, state in stage.values.layer_states().items()}
    assert {t.dtype for t in decode(files[1]).tensors.values() if t.dim()} == {torch.bfloat16}
    other = build_stage(task, 0, [(0, 4)], UNCLIPPED)
    other.values.restore({i: decode(data) for i, data in files.items()})
    assert other.values.digest() == add_digests(stage.values.digest() for stage in stages)
    assert one_step([other], 2, UNCLIPPED) == one_step(stages, 2, UNCLIPPED)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16 .*expected torch\.float32"):
        whole.values.restore(whole_state(other))
