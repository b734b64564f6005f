"""A chain of stages in one process against plain PyTorch; the bits of repeated work; what a layer may not do."""

import inspect
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bamboo_trainer import reference
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.models import mlp
from bamboo_trainer.stage.stage import Stage
from bamboo_trainer.stage.work import is_gradient
from bamboo_trainer.tasks import user_code
from bamboo_trainer.tasks.inspection.costs import layer_costs
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, SPLITS, at, begin, chain, microbatch, one_step, small_gpt, small_task, state_of


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-3), ("fp16", 2e-3)])
def test_a_chain_of_stages_trains_like_plain_pytorch(tmp_path, stages, tied, precision, tolerance):
    """To the bit; the gradient of tied parameters is summed layer by layer, hence a tolerance."""
    config = at(precision, max_gradient_norm=None)
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


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x), x


class Several(Pairs):
    def forward(self, x, other, scale=2.0):
        return self.inner(x) + other, other * scale


class Defaults(Pairs):
    def forward(self, x, other=None):
        return self.inner(x), x if other is None else other


class Any(Pairs):
    def forward(self, *parts):
        return self.inner(parts[0]), *parts[1:]


class One(Pairs):
    def forward(self, parts):
        x, other = parts
        return self.inner(x) + other


@pytest.mark.parametrize("checkpointed", [(), range(5)])
@pytest.mark.parametrize("split", [[(0, 5)], [(0, 1), (1, 3), (3, 5)]])
def test_a_tuple_is_unpacked_for_a_layer_that_takes_several_arguments(split, checkpointed):
    task = small_task(layers=(Pairs, Several, Defaults, Any, One), checkpointed=checkpointed)
    losses, state = reference.train(task, CONFIG, 3)
    stages = chain(task, split)
    assert [one_step(stages, k) for k in range(3)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)
    assert len(layer_costs(task, 2)) == 5


def test_what_a_forward_takes_is_asked_once_and_keeps_no_layer_alive(monkeypatch):
    asked = []
    signature = inspect.signature

    def asking(forward):
        if forward.__name__ == "forward":  # torch asks, too, of other functions
            asked.append(forward)
        return signature(forward)

    monkeypatch.setattr(user_code.inspect, "signature", asking)
    stages = chain(small_task(layers=(Pairs, Several, Defaults, Any, One)), [(0, 5)])
    for k in range(3):
        one_step(stages, k)
    assert len(asked) == 4  # the first layer gets one tensor
    monkeypatch.undo()
    layer = Several()
    gone = weakref.ref(layer)
    user_code.call_layer(layer, (torch.ones(2, 2), torch.ones(2, 2)))
    del layer
    assert gone() is None


def test_tied_stages_stay_equal_and_count_once(tmp_path):
    stages = chain(small_gpt(tmp_path, tieEmbeddings=True), SPLITS[4])
    assert [len(s.tied_segments()) for s in stages] == [1, 0, 0, 1]
    assert stages[0].tied_segments()[0].stages == {0, 3}
    ones = [torch.ones(s.size) for s in stages]
    assert (
        sum(n for s, g in zip(stages, ones, strict=True) for n in s.squared_norms(g))
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
    two[0].forward(again[0], 5, 1, None)  # a redundant forward
    second = microbatch(two, again, 5, 1)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a.gradients.target, b.gradients.target) for a, b in zip(works, again, strict=True))
    assert works[-1].losses == again[-1].losses


def test_backwards_of_two_works_do_not_mix(tmp_path):
    stage = Stage(small_gpt(tmp_path), 0, [(0, 4)], CONFIG)
    alone, other, mixed = begin(stage), begin(stage), begin(stage)
    for index in (0, 1):
        microbatch([stage], [alone], 0, index)
    for index in (0, 1):
        microbatch([stage], [mixed], 0, index)
        microbatch([stage], [other], 1, index)
    assert torch.equal(alone.gradients.target, mixed.gradients.target)
    assert not torch.equal(alone.gradients.target, other.gradients.target)


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


def test_neither_integer_parts_nor_unused_parts_have_a_gradient():
    task = small_task(layers=(lambda: nn.Linear(2, 2), WithCount, Ignoring))
    stages = chain(task, [(0, 1), (1, 2), (2, 3)])
    crossed = microbatch(stages, [begin(s) for s in stages], 0, 0)
    assert len(crossed[1]) == 3
    assert len(crossed[3]) == 2
    assert is_gradient(crossed[3][0])
    assert not is_gradient(crossed[3][1])
    torch.testing.assert_close(crossed[4][0], 2 * crossed[3][0])


class Flags(nn.Module):
    """Passes a number part on."""

    def forward(self, x):
        return x * 2, torch.arange(len(x))


class Renumbering(nn.Module):
    def forward(self, parts):
        return parts[0] + parts[1].add_(1)[:, None]


class Sometimes(nn.Module):
    """Writes only where it finds large values, so perhaps not in the first forward."""

    def forward(self, x):
        return x.mul_(0.5) if bool((x > 100).any()) else x * 0.5


@pytest.mark.parametrize("split", [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 4)], SPLITS[4]], ids=str)
@pytest.mark.parametrize("checkpointed", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("writer", ["first", "ReLU", "Renumbering"])
def test_a_layer_that_writes_to_its_inputs_is_refused_in_every_split(split, checkpointed, writer):
    linear, relu = partial(nn.Linear, 2, 2), partial(nn.ReLU, inplace=True)
    layers, name = {
        "first": ((relu, linear, nn.Tanh, linear), r"layer 0 \(ReLU\)"),
        "ReLU": ((linear, nn.Dropout, relu, linear), r"layer 2 \(ReLU\)"),
        "Renumbering": ((linear, Flags, Renumbering, linear), r"layer 2 \(Renumbering\)"),
    }[writer]
    task = small_task(layers=layers, checkpointed=checkpointed)
    with pytest.raises(TaskError, match=rf"^{name} writes to its inputs"):
        one_step(chain(task, split), 0)
    with pytest.raises(TaskError, match=rf"^{name} writes to its inputs"):
        layer_costs(task, 2)


@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)]], ids=str)
def test_a_layer_that_first_writes_later_is_refused_then(split):
    stages = chain(small_task(layers=(partial(nn.Linear, 2, 2), Sometimes)), split)
    one_step(stages, 0)
    with torch.no_grad():
        for parameter in stages[0]._layers[0].parameters():
            parameter.fill_(1000.0)
    with pytest.raises(TaskError, match=r"^layer 1 \(Sometimes\) writes to its inputs"):
        one_step(stages, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32], ids=str)
@pytest.mark.parametrize("split", [[(0, 2)], [(0, 1), (1, 2)]], ids=str)
def test_what_cannot_be_sent_may_not_be_passed_on_in_any_split(dtype, split):
    class Casting(nn.Linear):
        def forward(self, x):
            return super().forward(x).to(dtype)

    class Back(nn.Module):
        def forward(self, x):
            return torch.view_as_real(x)[..., 0] if dtype.is_complex else x.float()

    stages = chain(small_task(layers=(partial(Casting, 2, 2), Back)), split)
    with pytest.raises(TaskError, match=rf"^layer 0 \(Casting\) returned a tensor of {dtype}, expected one of"):
        one_step(stages, 0)


def test_a_sparse_tensor_may_not_be_passed_on():
    class Sparse(nn.Linear):
        def forward(self, x):
            return super().forward(x).to_sparse()

    with pytest.raises(TaskError, match=r"^layer 0 \(Sparse\) returned a tensor of layout torch.sparse_coo"):
        one_step(chain(small_task(layers=(partial(Sparse, 2, 2),)), [(0, 1)]), 0)


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
    assert not torch.equal(stages[0].state_tensors()["layers.0.weight"], before[1])
    losses, state = reference.train(small_task(layers=(Sharing, Shared)), CONFIG, 4)
    stages = chain(small_task(layers=(Sharing, Shared)), [(0, 1), (1, 2)])
    assert [one_step(stages, k) for k in range(4)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state_of(stages), state, rtol=1e-5, atol=1e-6)


class Counting(TensorDataset):
    calls = 0

    def batch(self, indices):
        self.calls += 1
        return super().batch(indices)


@pytest.mark.parametrize(("split", "reads"), [([(0, 3)], 1), ([(0, 1), (1, 3)], 2)], ids=str)
def test_each_end_of_the_pipeline_reads_a_microbatch_once(split, reads):
    points = torch.arange(24.0).reshape(12, 2)
    data = Counting((points,), (points,))
    stages = chain(small_task(dataset=data), split)
    works = [begin(s) for s in stages]
    microbatch(stages, works, 0, 0)
    assert data.calls == 2 * reads, "the very first is read twice, to compare"
    microbatch(stages, works, 0, 1)
    assert data.calls == 3 * reads


def test_the_dataset_must_return_tuples_of_tensors():
    for wrong in (None, (torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), ((torch.zeros(2),), [1])):
        data = Counting((torch.zeros(12, 2),), (torch.zeros(12, 2),))
        data.batch = lambda indices, wrong=wrong: wrong
        with pytest.raises(TaskError, match=r"^the dataset returned .*, expected \(inputs, targets\)"):
            one_step(chain(small_task(dataset=data), [(0, 3)]), 0)
