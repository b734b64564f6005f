"""Activation checkpointing: marked layers are recomputed in the backward, with less memory and the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.task_errors import TaskError
from stage_kit import CONFIG, SPLITS, begin, chain, microbatch, one_step, small_gpt, small_task, storages

BF16 = replace(CONFIG, precision="bf16")


@pytest.mark.parametrize("config", [CONFIG, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_every_layer_may_be_marked(tmp_path: Path, stages: int, tied: bool, config: Any) -> None:
    """Recomputation changes no bit, not even in the gradient of a parameter that two layers of a stage share."""
    task = small_gpt(tmp_path, dropout=0.2, tieEmbeddings=tied)
    digests = []
    for marked in ((), (1, 2), (0, 1, 2, 3)):
        parts = chain(replace(task, checkpointed=marked), SPLITS[stages], config)
        digests.append([*(one_step(parts, step, config) for step in range(3)), *(s.values.digest() for s in parts)])
    assert digests[0] == digests[1] == digests[2]


def kept(stage: Stage, given: torch.Tensor) -> int:
    """Return the bytes that autograd keeps of a forward, without parameters, inputs and outputs."""
    work, saved = begin(stage), list[torch.Tensor]()
    stage.rehearse(0, 0, (given,))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = stage.forward(work, 0, 0, (given,))
    ((inputs, _),) = work.contexts.values()
    others = storages([*inputs, *outputs, *(tensor for _, tensor in stage.values.parameters.named())])
    return sum(size for at, size in storages(saved).items() if at not in others)


def test_a_marked_layer_keeps_nothing_but_its_inputs(tmp_path: Path) -> None:
    sizes = []
    for checkpoint in (False, True):
        stage = build_stage(small_gpt(tmp_path, checkpoint=checkpoint), 1, [(0, 1), (1, 3), (3, 4)], CONFIG)
        sizes.append(kept(stage, torch.zeros(2, 8, 16)))
    between = 2 * 8 * 16 * 4  # bytes from the first block to the second
    assert sizes[1] == between < sizes[0] / 10


class Pair(nn.Linear):
    """A layer that counts its calls, and also returns whole numbers and its input."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def forward(self, given: torch.Tensor | Parts) -> Parts:
        self.calls += 1
        x = given[0] if isinstance(given, tuple) else given
        return super().forward(x).tanh(), torch.arange(len(x)), x


class Last(nn.Module):
    def forward(self, parts: Parts) -> torch.Tensor:
        return parts[0] * parts[1][:, None] + parts[2]


def test_layers_may_pass_tuples_and_are_called_twice() -> None:
    crossed, calls = [], []
    for marked in ((), (0, 1)):
        task = small_task(layers=(Pair, Pair, Last), checkpointed=marked)
        stages = chain(task, [(0, 1), (1, 3)])
        works = [begin(s) for s in stages]
        crossed.append([*microbatch(stages, works, 0, 0), tuple(w.gradients.target for w in works)])
        calls.append([layer.calls for s in stages for layer in s.values.layers.values() if isinstance(layer, Pair)])
    assert calls == [[1, 1], [2, 2]]
    for one, other in zip(*crossed, strict=True):
        assert all(a is b or torch.equal(a, b) for a, b in zip(one or (), other or (), strict=True))


class Fickle(Pair):
    """A layer that fails when it is repeated in the backward."""

    def forward(self, given: torch.Tensor | Parts) -> Parts:
        if self.calls == 1:
            raise KeyError("gone")
        return super().forward(given)


def test_a_layer_that_cannot_be_repeated_is_told_by_name() -> None:
    task = small_task(layers=(Fickle, Last), checkpointed=(0,))
    with pytest.raises(TaskError, match="the backward of layers 0 to 1, at step 1, microbatch 0, raised KeyError"):
        one_step(chain(task, [(0, 2)]), 0)


@pytest.mark.parametrize("wrong", [(3,), (-1,), (True,), ("1",), (1.0,), 1, None])
def test_what_is_no_layer_cannot_be_marked(wrong: Any) -> None:
    with pytest.raises(TaskError, match=r"task\.checkpointed must be a collection of layer numbers from 0 to 2, got"):
        chain(small_task(checkpointed=wrong), [(0, 3)])
