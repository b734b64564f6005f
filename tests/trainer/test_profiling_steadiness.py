"""Steadiness of `bamboo profile`'s measurements, and counts of a GPU's operations on machines without a GPU."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bamboo.local.trainer_calls.task_profile import counts_of
from bamboo.profiles.analytic import analytic_profile
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.loading import settled_task
from bamboo_trainer.memory.estimate import measure
from bamboo_trainer.profiling import FusedOperations, LayerWork, count, is_steady, layer_work, profile, spread
from bamboo_trainer.tasks.operations import Operations
from profiling_kit import manifest


def test_the_spread_is_of_the_median_and_not_of_the_times() -> None:
    """Four times as many measurements halve the median's spread, and one outlier does not change it."""
    some = [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0, 1.0]
    assert spread(some * 4) == pytest.approx(spread(some) / 2, rel=0.3)
    assert spread([1.0] * 9 + [50.0]) == 0.0
    assert spread([1.0] * 4) == spread([0.0] * 9) == math.inf


@pytest.mark.parametrize(
    ("times", "steady"),
    [
        ([1.0, 1.0, 1.01, 1.0, 1.0, 0.99], True),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], False),
        ([1e-7, 5e-7, 1e-7, 5e-7, 1e-7, 5e-7], True),  # too short to matter
    ],
)
def test_times_are_steady_if_their_median_is_known(times: list[float], steady: bool) -> None:
    assert is_steady(times) == steady


@functools.cache
def counted(precision: str = "fp32", **config: Any) -> tuple[LayerWork, ...]:
    document = manifest(**config)
    document["spec"]["training"]["precision"] = precision
    task, spec = settled_task(parse_manifest(document))
    return layer_work(task, spec)


def flops(rows: tuple[tuple[str, int, int, int], ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, operations, _, times in rows:
        found[number] = found.get(number, 0) + operations * times
    return {number: total for number, total in found.items() if total}


def test_a_block_has_the_products_of_its_matrices_and_of_attention() -> None:
    """A BERT block's backward has two products per product of its forward, and up to three per product of attention."""
    block = counted()[1]
    tokens, width = 2 * 16, 16
    matrices = 2 * tokens * (3 + 1 + 4 + 4) * width * width
    attention = 2 * 2 * tokens * 16 * width
    assert flops(block.forward) == {"fp32": matrices + attention}
    assert 2 * matrices + 2 * attention <= flops(block.backward)["fp32"] <= 2 * matrices + 3 * attention


def test_products_are_of_the_jobs_precision_and_parameters_are_cast_once_a_step() -> None:
    whole, half = counted()[1], counted("bf16")[1]
    assert flops(half.forward) == {"bf16": flops(whole.forward)["fp32"]}
    cast = 4 * 16 * 16 * (4 + 2)  # of the weight of the MLP, were it read in fp32 and written in bf16
    assert not [row for row in half.forward if row[1] == 0 and row[2] == cast]


def test_the_last_layer_has_the_loss_and_the_first_no_gradient_of_its_inputs() -> None:
    first, *_, last = counted()
    assert not flops(first.forward)
    vocabulary, tokens, width = 97, 2 * 16, 16
    assert flops(last.forward)["fp32"] >= 2 * tokens * width * (vocabulary + width)
    assert sum(times for *_, times in last.forward) > 5


def test_attention_and_dropout_are_one_operation_as_on_a_gpu() -> None:
    query = torch.ones(1, 2, 8, 4)
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with FusedOperations(), Operations() as fused:
        found = F.scaled_dot_product_attention(query, query, query, attn_mask=mask, dropout_p=0.5)
        dropped = F.dropout(found, 0.5, training=True)
    assert found.shape == dropped.shape == query.shape
    assert sum(fused.kernels.values()) == 2
    with FusedOperations():
        assert F.dropout(query, 0.5, training=False) is query


def test_a_convolution_in_fp32_may_be_rounded_to_tf32() -> None:
    with Operations() as operations:
        nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8))
    assert [kernel.number for kernel in operations.kernels if kernel.flops] == ["tf32"]


def test_a_language_model_is_counted_without_data_whatever_its_tokens_weigh(caplog: pytest.LogCaptureFixture) -> None:
    """Counting runs the loss without data: real logits (samples x length x vocabulary) could take gigabytes."""
    caplog.set_level("INFO")
    task, spec = settled_task(parse_manifest(manifest()))
    layer_work(task, spec)
    measure(task, spec)
    assert "the layers are run with data" not in caplog.text


def test_a_layer_that_keeps_only_its_inputs_is_run_again_in_its_backward() -> None:
    usual = counted()[1]
    task, spec = settled_task(parse_manifest(manifest()))
    again = layer_work(replace(task, checkpointed=[1]), spec)[1]
    assert flops(again.backward)["fp32"] == flops(usual.backward)["fp32"] + flops(usual.forward)["fp32"]


def test_counted_layers_have_the_bytes_of_measured_ones() -> None:
    answer, measured = count(manifest()), profile(manifest(), 1)
    names = ("parameters", "optimizer", "gradients", "activations", "boundary", "cost")
    assert [[one[name] for name in names] for one in answer["layers"][:-1]] == [
        [one[name] for name in names] for one in measured["layers"][:-1]
    ]
    spec = parse_manifest(manifest())
    found = analytic_profile(counts_of(spec, answer), "l4")
    assert (found.name, found.samples, len(found.layers)) == ("tiny@l4", 2, 5)
    assert all(layer.forward > 0 and layer.backward > 0 and layer.update > 0 for layer in found.layers)
