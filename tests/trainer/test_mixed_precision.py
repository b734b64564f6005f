"""bf16 casts of parameters, kept for all microbatches without changing a bit, and results independent of the split."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bamboo_core.control.digests import add_digests
from bamboo_trainer.stage import forwarding
from bamboo_trainer.tasks.mixed_precision import autocast, autocast_and_keep, forget_casts
from stage_kit import CONFIG, at, begin, chain, microbatch, one_step, small_gpt, small_task, whole_state

BF16 = replace(CONFIG, precision="bf16")
SPLIT = [(0, 2), (2, 4)]


def _train(task, keep, monkeypatch: pytest.MonkeyPatch):
    """Train two steps in the context `keep`, all forwards before all backwards. Return the stages' final digests."""
    monkeypatch.setattr(forwarding, "autocast_and_keep", keep)
    stages = chain(task, SPLIT, BF16)
    for step in range(2):
        works = [begin(s) for s in stages]
        sent = [stages[0].forward(works[0], step, m, None) for m in range(3)]
        for m in range(3):
            stages[1].forward(works[1], step, m, sent[m])
        for m in range(3):
            gradients = stages[1].backward(works[1], step, m, None)
            stages[0].backward(works[0], step, m, gradients)
        for s, work in zip(stages, works, strict=True):
            s.values.apply(work.gradients.total()[: s.values.size], 1.0)
    return [s.values.digest() for s in stages]


@pytest.mark.parametrize("tied", [False, True])
def test_kept_casts_change_no_bit(tmp_path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    task = small_gpt(tmp_path, tieEmbeddings=tied, dropout=0.1)
    assert _train(task, autocast_and_keep, monkeypatch) == _train(task, autocast, monkeypatch)


def test_a_parameter_is_cast_once_for_all_microbatches(tmp_path) -> None:
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            seen.add(tensor.untyped_storage().data_ptr())
        return tensor

    stage = chain(small_gpt(tmp_path), SPLIT, BF16)[1]
    inputs = torch.randn(2, 8, 16)
    stage.forward(begin(stage), 0, 0, (inputs,))  # the first one has hooks of its own
    forget_casts()
    work = begin(stage)
    counts = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for m in range(3):
            before = len(seen)
            stage.forward(work, 0, m, (inputs,))
            counts.append(len(seen) - before)
    weights = sum(p.dim() == 2 for layer in stage.values.layers.values() for p in layer.parameters())
    assert counts[0] - counts[1] >= weights - 1
    assert counts[1] == counts[2]


@pytest.mark.parametrize("checkpointed", [frozenset[int](), frozenset({0, 1, 3})])
def test_the_gradients_of_casts_are_cast_back_before_the_backward_of_the_next_layer(
    tmp_path, checkpointed: frozenset[int]
) -> None:
    """A backward adds a layer's gradients to its parameters before it runs the layer below, also for kept casts."""
    task = replace(small_gpt(tmp_path, tieEmbeddings=True), checkpointed=checkpointed)
    stage = chain(task, [(0, 4)], BF16)[0]
    reached: list[int] = []
    for index, layer in stage.values.layers.items():
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: reached.append(index))
    work = begin(stage)
    for m in range(3):
        stage.forward(work, 0, m, None)
    for m in range(3):
        reached.clear()
        stage.backward(work, 0, m, None)
        assert reached == sorted(reached, reverse=True)
        assert set(reached) == {0, 1, 2, 3}


def test_nothing_stays_switched_on(tmp_path) -> None:
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast_and_keep(torch.device("cpu"), "bf16"):
        assert linear(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert linear(x).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), autocast_and_keep(torch.device("cpu"), "bf16"):
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_stages_keep_their_own(tmp_path) -> None:
    """Two holders of a stage in one process, at different versions, do not use each other's casts."""
    task = small_gpt(tmp_path)
    stages, others = chain(task, SPLIT, BF16), chain(task, SPLIT, BF16)
    works = [begin(s) for s in stages]
    microbatch(stages, works, 0, 0)
    for s, work in zip(stages, works, strict=True):
        s.values.apply(work.gradients.target[: s.values.size], 1.0)
    microbatch(others, [begin(s) for s in others], 0, 0)
    alone = chain(task, SPLIT, BF16)
    for s, fresh in zip(stages, alone, strict=True):
        fresh.values.restore(whole_state(s))
    forget_casts()
    mixed = microbatch(stages, [begin(s) for s in stages], 1, 0)
    forget_casts()
    expected = microbatch(alone, [begin(s) for s in alone], 1, 0)
    for a, b in zip(mixed, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a or (), b or (), strict=True))


class Uses(nn.Module):
    """A layer that uses its input in three products, as attention does."""

    def __init__(self, reduced: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.reduced = reduced  # by itself, whatever the job's precision is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.reduced else nullcontext():
            return self.query(x).float() * self.key(x).float() + self.value(x).float()


@pytest.mark.parametrize(("precision", "reduced"), [("bf16", False), ("fp16", False), ("fp32", True)])
def test_the_gradient_of_an_input_of_several_products_does_not_depend_on_the_split(
    precision: str, reduced: bool
) -> None:
    """An input's gradient from several products is summed in fp32, also at a stage's first layer."""
    uses = partial(Uses, reduced)
    task = small_task(layers=(lambda: nn.Linear(2, 16), uses, uses, lambda: nn.Linear(16, 2)))
    splits = [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]]
    digests = set()
    for split in splits:
        stages = chain(task, split, at(precision))
        for step in range(8):
            one_step(stages, step, at(precision))
        digests.add(add_digests(stage.values.digest() for stage in stages))
    assert len(digests) == 1
