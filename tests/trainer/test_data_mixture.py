"""Several datasets in one training: whose sample is when, whatever the grid, and what is said of each."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.data_record import difference
from bamboo_trainer.data import Ends, Mixture, TensorDataset, by_source, dataset_from
from bamboo_trainer.data.mixture import MixtureOrder
from bamboo_trainer.data.record import record_of
from bamboo_trainer.loading import load_task
from bamboo_trainer.task import TrainingFacts, Weighted
from disturbed_jobs import disturbed_alike
from stage_kit import small_task

WEIGHTS = st.lists(st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=2, max_size=9)
GPT2 = {"vocabulary": 64, "positions": 12, "width": 16, "heads": 2, "blocks": 3}


def order(lengths: list[int], weights: list[float], ends: str = "longest") -> MixtureOrder:
    return MixtureOrder(tuple(lengths), tuple(Fraction(str(weight)) for weight in weights), Ends(ends))


def numbers(first: int, count: int) -> TensorDataset:
    values = torch.arange(first, first + count)
    return TensorDataset((values[:, None].float(),), (values,))


@given(WEIGHTS, st.integers(0, 10**9))
def test_each_source_has_its_share_after_any_number_of_samples(weights: list[float], samples: int) -> None:
    mixed = order([5] * len(weights), weights)
    before, after = mixed.counts(samples), mixed.counts(samples + 1)
    whole = sum(mixed.weights)
    assert sum(before) == samples
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(weights) - 1) + [1]
    for weight, count in zip(mixed.weights, before, strict=True):
        assert abs(count - samples * weight / whole) < 2


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.data(), st.sampled_from(list(Ends)))
def test_each_pass_of_a_source_visits_each_of_its_samples_once(lengths: list[int], data: Any, ends: Ends) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    mixed = order(lengths, weights, ends)
    length = mixed.samples_of_pass
    taken = mixed.microbatch(3, 0, length)
    begins = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    whole = 0
    for begin, end in pairwise(begins):
        own = [sample for sample in taken if begin <= sample < end]
        for first in range(0, len(own), end - begin):
            part = own[first : first + end - begin]
            assert len(set(part)) == len(part)
        whole += len(own) >= end - begin
        assert ends is Ends.LONGEST or len(own) <= end - begin
    assert whole == len(lengths) if ends is Ends.LONGEST else whole >= 1
    assert mixed.microbatch(3, 7, 5) == mixed.microbatch(3, 0, 12)[7:], "a pure function of the place"


def test_passes_are_in_another_order_each_time() -> None:
    mixed = order([30, 10], [3, 1])
    assert mixed.samples_of_pass == 40
    one, two = mixed.microbatch(0, 0, 40), mixed.microbatch(0, 40, 40)
    assert Counter(one) == Counter(two) == Counter(range(40))
    assert one != two
    assert one != mixed.microbatch(1, 0, 40)
    short = order([30, 5], [3, 1], "shortest")
    assert short.samples_of_pass < 24
    again = [sample for sample in short.microbatch(0, short.samples_of_pass, short.samples_of_pass) if sample >= 30]
    assert sorted(again) == list(range(30, 35)), "all begin again"
    long = order([30, 5], [3, 1])
    assert long.samples_of_pass in range(38, 43)
    own = [sample for sample in long.microbatch(0, 0, 40) if sample >= 30]
    assert sorted(own[:5]) == sorted(own[5:10]) == list(range(30, 35))
    assert own[:5] != own[5:10]


def test_samples_come_with_the_number_of_their_source() -> None:
    mixed = Mixture({"a": (1, numbers(0, 4)), "b": (0.5, numbers(100, 3))})
    (x,), (value, source) = mixed.batch([6, 0, 3, 4])
    assert (x.flatten().tolist(), value.tolist()) == ([102, 0, 3, 100], [102, 0, 3, 100])
    assert (source.tolist(), source.dtype) == ([1, 0, 0, 1], torch.int64)
    assert (len(mixed), mixed.tokens_per_sample) == (7, None)


def test_an_epoch_is_a_pass_over_the_mixture() -> None:
    mixed = Mixture({"a": (1, numbers(0, 40)), "b": (1, numbers(0, 10))}, "shortest")
    facts = TrainingFacts(steps=None, epochs=3, global_batch_size=10, micro_batch_size=5)
    assert mixed.order.samples_of_pass in (19, 20, 21)
    assert facts.steps_with(mixed) == -(-3 * mixed.order.samples_of_pass // 10)


@pytest.mark.parametrize("weight", [0.3001, 0.2])
def test_other_weights_are_other_data(weight: float) -> None:
    def mixed(other: float, ends: str = "longest") -> Any:
        sources = {"a": (0.7, numbers(0, 4000)), "b": (other, numbers(0, 500))}
        return record_of(small_task(dataset=Mixture(sources, ends)), 0)

    assert difference(mixed(0.3), mixed(0.3)) is None
    assert difference(mixed(0.3), mixed(weight)) is not None
    assert difference(mixed(0.3), mixed(0.3, "shortest")) is not None


def test_the_loss_of_each_source() -> None:
    def summed(outputs: Any, targets: Any) -> Weighted:
        return Weighted((outputs[0] * targets[0]).sum(), len(targets[0]))

    def mean(outputs: Any, targets: Any) -> torch.Tensor:
        return outputs[0].mean()

    outputs, targets = (torch.tensor([1.0, 2.0, 4.0]),), (torch.tensor([1, 1, 2]), torch.tensor([0, 2, 0]))
    for loss, expected in ((summed, 9.0), (mean, 5.0)):
        a, b, c = (metric(outputs, targets) for metric in by_source(loss, ["a", "b", "c"]).values())
        assert (float(a.total), a.weight, float(b.weight), float(c.total), c.weight) == (expected, 2, 0, 2.0, 1)


SOURCE = {"kind": "random", "length": 12, "samples": 9, "weight": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "data.sources is missing"),
        ({"sources": [1]}, "data.sources must be a list of mappings, got [1]"),
        ({"sources": [{"kind": "text", "length": 8}]}, "data.sources[0].weight is missing"),
        ({"sources": [{"kind": "text", "length": 8, "weight": 1}]}, "data: a mixture must have at least two sources"),
        ({"sources": [{"kind": "text", "weight": 1}]}, "data.sources[0].length is missing"),
        ({"sources": [{"kind": "text", "length": 8, "weight": 1, "readers": 2}]}, "data.sources[0].readers: expected"),
        ({"sources": [{"kind": "mixture", "weight": 1, "sources": []}]}, "data.sources[0].kind: a mixture cannot be"),
        ({"sources": [{"kind": "text", "length": 8, "weight": 1, "name": "a-b"}]}, "data.sources[0].name must be"),
        ({"sources": [{"kind": "text", "length": 8, "weight": w} for w in (1, 0)]}, "the weight of 1 must be a"),
        ({"sources": [{"kind": "text", "length": n, "weight": 1} for n in (8, 9)]}, "int64 [8] and int64 [8] of 0, "),
        ({"sources": [{"kind": "text", "length": 8, "weight": 1}] * 2, "ends": "never"}, "ends must be one of longest"),
    ],
)
def test_what_is_no_mixture_is_one_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^data") as refused:
        dataset_from({"kind": "mixture", **config})
    assert said in str(refused.value)


@pytest.mark.slow
def test_a_mixture_trains_with_the_same_bits_on_any_grid() -> None:
    """And its metrics tell the losses of the sources, which add up to the loss."""
    sources = [{**SOURCE, "padding": True, "name": "a", "weight": 3}, {**SOURCE, "padding": True, "name": "b"}]
    data = {"kind": "mixture", "sources": sources, "trim": 2}
    settings = {
        "architecture": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2},
        "data": data,
        "warmupSteps": 10,  # else the rate is 0 after the first step, as no job's length is known here
    }
    pytest.importorskip("transformers")
    task = {"entrypoint": "bamboo_trainer.models.huggingface:build", "config": settings}
    alone = disturbed_alike(task)
    told = alone.state.progress.metrics
    assert set(told) == {"loss_a", "loss_b"}


def test_a_language_model_of_the_library_learns_a_mixture() -> None:
    sources = [{**SOURCE, "name": "a"}, {**SOURCE, "kind": "text", "samples": None, "name": "b"}]
    sources[1].pop("samples")
    config = {**GPT2, "vocabulary": 256, "data": {"kind": "mixture", "sources": sources}}
    task = load_task("bamboo_trainer.models.gpt2:build", config)
    assert list(task.metrics) == ["loss_a", "loss_b"]
    (ids,), (labels, source) = task.dataset.batch([0, 9])
    assert (ids.shape, labels.shape, source.tolist()) == ((2, 12), (2, 12), [0, 1])
