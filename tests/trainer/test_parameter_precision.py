"""Parameters in bf16: half the memory of state, gradients summed in fp32, the same bits on any grid."""

from dataclasses import replace

import pytest
import torch

import reference
from bamboo_core.control.digests import add_digests
from bamboo_trainer.checkpoint.layer_file import decode, encode
from bamboo_trainer.stage.stage import build_stage
from precision_kit import build
from stage_kit import ROUNDED, SPLITS, chain, one_step, small_gpt, state_bytes, state_of, whole_state

UNCLIPPED = replace(ROUNDED, max_gradient_norm=None)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_like_plain_pytorch_with_rounded_parameters(tmp_path, stages: int, tied: bool) -> None:
    task = small_gpt(tmp_path, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, UNCLIPPED, 6)
    parts = chain(task, SPLITS[stages], UNCLIPPED)
    told = [one_step(parts, k, UNCLIPPED) for k in range(6)]
    trained = state_of(parts)
    assert {str(t.dtype) for t in trained.values()} == {"torch.bfloat16", "torch.float32"}, "norms stay in fp32"
    if tied:
        assert told == pytest.approx(losses, rel=2e-2)
    else:
        assert told == losses
        torch.testing.assert_close(trained, state, rtol=0, atol=0)
    assert losses[-1] < losses[0]


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
    assert other.values.digest() == add_digests(stage.values.share_of_digest() for stage in stages)
    assert one_step([other], 2, UNCLIPPED) == one_step(stages, 2, UNCLIPPED)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16 .*expected torch\.float32"):
        whole.values.restore(whole_state(other))
