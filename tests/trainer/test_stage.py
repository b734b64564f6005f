"""A chain of stages in one process against plain PyTorch; the bits of repeated work; what a layer may not do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.tasks.inspection.costs import layer_costs
from stage_kit import CONFIG, ROUNDED, SPLITS, at, begin, chain, microbatch, one_step, small_gpt, small_task, state_of
from stage_task_kit import Any, Counting, Defaults, One, Pairs, Several

FORMS = {  # and a tolerance for tied parameters, whose gradient is summed layer by layer
    "fp32": (at("fp32"), 2e-5),
    "bf16": (at("bf16"), 2e-3),
    "fp16": (at("fp16"), 2e-3),
    "boundaries in bf16": (at("bf16", boundary_precision="bf16"), 2e-2),
    "parameters in bf16": (ROUNDED, 2e-2),
}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_stages_trains_like_plain_pytorch(tmp_path, stages, tied, form):
    """To the bit, and what is rounded leaves other bits."""
    config, tolerance = replace(FORMS[form][0], max_gradient_norm=None), FORMS[form][1]
    task = small_gpt(tmp_path, dropout=0.1, tieEmbeddings=tied, learningRate=1e-2, warmupSteps=2, steps=6)
    losses, state = reference.train(task, config, 6)
    parts = chain(task, SPLITS[stages], config)
    if tied:
        assert [one_step(parts, k, config) for k in range(6)] == pytest.approx(losses, rel=tolerance)
        torch.testing.assert_close(state_of(parts), state, rtol=tolerance, atol=tolerance)
    else:
        assert [one_step(parts, k, config) for k in range(6)] == losses
        torch.testing.assert_close(state_of(parts), state, rtol=0, atol=0)
    assert losses[-1] < losses[0]
    exact = replace(config, boundary_precision="fp32", parameter_precision="fp32")
    assert (reference.train(task, exact, 6)[0] == losses) is (config == exact)


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


@pytest.mark.parametrize("checkpointed", [(), range(5)])
@pytest.mark.parametrize("split", [[(0, 5)], [(0, 1), (1, 3), (3, 5)]])
def test_a_tuple_is_unpacked_for_a_layer_that_takes_several_arguments(split, checkpointed):
    task = small_task(layers=(Pairs, Several, Defaults, Any, One), checkpointed=checkpointed)
    losses, state = reference.train(task, CONFIG, 3)
    stages = chain(task, split)
    assert [one_step(stages, k) for k in range(3)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)
    assert len(layer_costs(task, 2)) == 5


def test_tied_stages_stay_equal_and_count_once(tmp_path):
    stages = chain(small_gpt(tmp_path, tieEmbeddings=True), SPLITS[4])
    assert [len(s.values.final.tied) for s in stages] == [1, 0, 0, 1]
    assert stages[0].values.final.tied[0].stages == {0, 3}
    ones = [torch.ones(s.values.final.size) for s in stages]
    assert (
        sum(n for s, g in zip(stages, ones, strict=True) for n in s.values.final.squared_norms(g).tolist())
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
    works, again = [begin(s) for s in one], [begin(s) for s in two]
    first = microbatch(one, works, 5, 1)
    torch.rand(17)  # whatever else drew random numbers
    two[0].forward(again[0], 5, 1, None)  # once more
    second = microbatch(two, again, 5, 1)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a.gradients.target, b.gradients.target) for a, b in zip(works, again, strict=True))
    assert works[-1].figures() == again[-1].figures()


class Reads(TorchDispatchMode):
    """Counts how often a tensor's value is read, for which a device would have to be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_loss_is_read_when_it_is_asked_for_and_not_before():
    stage = build_stage(small_task(), 0, [(0, 3)], CONFIG)
    work = begin(stage, 0, 1)
    stage.forward(work, 0, 0, None)  # the first one of all is looked at
    with Reads() as reads:
        stage.forward(work, 0, 1, None)
        stage.backward(work, 0, 0, None)
        stage.backward(work, 0, 1, None)
        assert (reads.count, work.losses) == (0, {})
        work.read(work.figures())
        assert reads.count == 2
    assert sorted(work.losses) == [0, 1]
    assert work.figures() == ()


def test_the_gradient_given_to_apply_is_not_modified():
    stage = build_stage(small_task(), 0, [(0, 3)], CONFIG)
    gradient = torch.ones(stage.values.final.size)
    stage.values.apply(gradient, 100.0)
    assert torch.equal(gradient, torch.ones(stage.values.final.size))


class Sharing(nn.Linear):
    """Passes its weight on, as a model does that ties it by hand; and a part of a table."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        return super().forward(x), self.weight, self.weight[1:].T, self.table[:2]


class Shared(nn.Module):
    def forward(self, parts):
        return parts[0] @ parts[1] + parts[2].T + parts[3]


def test_what_was_sent_stays_as_it_was_when_it_was_a_parameter():
    stages = chain(small_task(layers=(Sharing, Shared)), [(0, 1), (1, 2)])
    work = begin(stages[0])
    sent = stages[0].forward(work, 0, 0, None)
    before = [p.clone() for p in sent]
    one_step(stages, 0)
    assert all(torch.equal(a, b) for a, b in zip(sent, before, strict=True))
    assert not torch.equal(stages[0].values.state_tensors()["layers.0.weight"], before[1])
    losses, state = reference.train(small_task(layers=(Sharing, Shared)), CONFIG, 4)
    stages = chain(small_task(layers=(Sharing, Shared)), [(0, 1), (1, 2)])
    assert [one_step(stages, k) for k in range(4)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("split", "reads"), [([(0, 3)], 1), ([(0, 1), (1, 3)], 2)], ids=str)
def test_each_end_of_the_pipeline_reads_a_microbatch_once(split, reads):
    points = torch.arange(24.0).reshape(12, 2)
    data = Counting((points,), (points,))
    stages = chain(small_task(dataset=data), split)
    works = [begin(s) for s in stages]
    microbatch(stages, works, 0, 0)
    assert data.calls == reads
    microbatch(stages, works, 0, 1)
    assert data.calls == 2 * reads
