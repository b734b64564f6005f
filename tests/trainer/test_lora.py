"""Adapters: only they are trained, as in plain PyTorch, on any grid; merged into the base they give the model."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
from bamboo_core.control.digests import add_digests
from bamboo_trainer.lora import LoraLinear, merged, with_lora
from bamboo_trainer.models import gpt
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.user_code import build_layer
from manifest_kit import TEXT
from stage_kit import CONFIG, SPLITS, chain, one_step, small_task, state_of

PATTERNS = ("*qkv", "projection", "head")


def tiny(**config: Any) -> Task:
    return gpt.build({"dModel": 16, "heads": 2, "blocks": 2, "context": 8, "dropout": 0.1, "text": TEXT, **config})


def build(config: Mapping[str, Any]) -> Task:
    return with_lora(tiny(**config), rank=2, alpha=4.0, targets=PATTERNS, dropout=0.1, trained=("norm.*",))


def run(task: Task, state: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the outputs of a model with these weights, in eval mode."""
    x = tokens
    for index in range(len(task.layers)):
        layer = build_layer(task, 7, index).eval()
        layer.load_state_dict(
            {n.removeprefix(f"layers.{index}."): t for n, t in state.items() if f".{index}." in n[:9]}
        )
        x = layer(x)
    return x.detach()


def test_only_adapters_are_trained_and_merged_they_are_the_model() -> None:
    task = build({})
    stages = chain(task, [(0, 2), (2, 4)])
    before = state_of(stages)
    for step in range(3):
        one_step(stages, step)
    after = state_of(stages)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".lora_a" in name or ".lora_b" in name or ".norm." in name}
    slots = [slot.name for stage in stages for slot in stage.values.parameters.slots]
    assert sorted(f"layers.{name}" for name in slots) == sorted(changed), "the optimizer knows no others"
    torch.testing.assert_close(after, reference.train(task, CONFIG, 3)[1], rtol=1e-4, atol=1e-6)
    whole, tokens = merged(after), torch.arange(16).reshape(2, 8)
    assert whole.keys() == state_of(chain(tiny(), [(0, 4)])).keys(), "the names of the original model"
    torch.testing.assert_close(run(tiny(), whole, tokens), run(task, after, tokens), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(run(tiny(), whole, tokens), run(tiny(), merged(before), tokens))


def test_the_base_has_the_values_that_it_has_without_adapters() -> None:
    plain, adapted = (state_of(chain(task, [(0, 4)])) for task in (tiny(), build({})))
    torch.testing.assert_close(merged(adapted), plain, rtol=0, atol=0)


def test_a_layer_that_is_a_linear_itself_gets_an_adapter() -> None:
    task = with_lora(small_task(), rank=1)
    (stage,) = chain(task, [(0, 3)])
    assert [type(layer) for layer in stage.values.layers.values()] == [LoraLinear, nn.Tanh, LoraLinear]
    for step in range(2):
        one_step([stage], step)
    names = {name.removeprefix("layers.") for name in merged(state_of([stage]))}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 1, "dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"rank": 1, "targets": ("*q_porj",)}, r"no nn.Linear fits the targets \['\*q_porj'\]; there are 'qkv', 'proj"),
    ],
)
def test_what_cannot_be_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(tiny(), **options)


@pytest.mark.parametrize("targets", [("*qkv",), ("*",)])
def test_a_frozen_tied_matrix_counts_once_in_the_digest_of_any_split(targets: tuple[str, ...]) -> None:
    """Embedding and head may be on different stages, and `--verify` compares sums of the stages' digests.

    With "*" the head has an adapter, and stays tied to the embedding.
    """
    task = with_lora(tiny(tieEmbeddings=True), rank=2, targets=targets)
    digests = [add_digests(stage.values.digest() for stage in chain(task, split)) for split in SPLITS.values()]
    assert digests == digests[:1] * len(digests)
