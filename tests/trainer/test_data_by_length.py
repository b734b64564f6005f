"""Samples of near lengths in one microbatch: each once a pass, the same on any grid, and less padding."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.data_record import difference
from bamboo_trainer.data import ByLength, Mixture, Passes, TensorDataset
from bamboo_trainer.data.by_length import OrderByLength
from bamboo_trainer.data.record import record_of
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import samples_in_order, samples_of_pass
from stage_kit import small_task


def padded(order: Any, lengths: Sequence[int], size: int) -> float:
    """The share of a pass's tokens that is padding, if each microbatch ends with its longest sample."""
    parts = [order.microbatch(0, first, size) for first in range(0, len(lengths) - size + 1, size)]
    held = sum(size * max(lengths[sample] for sample in part) for part in parts)
    return 1 - sum(lengths[sample] for part in parts for sample in part) / held


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**62)
)
def test_each_pass_visits_each_sample_once(lengths: list[int], size: int, near: int, seed: int) -> None:
    order, count = OrderByLength(Passes(len(lengths)), lengths, near), len(lengths)
    visited = [n for first in range(0, 3 * count + size, size) for n in order.microbatch(seed, first, size)]
    for first in (0, count, 2 * count):
        assert sorted(visited[first : first + count]) == list(range(count))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 20))
def test_steps_of_as_many_microbatches_have_the_samples_that_they_had(near: int, size: int, step: int) -> None:
    """A pass of 240 samples is of whole steps."""
    lengths = [n * 37 % 101 for n in range(240)]
    order, usual = OrderByLength(Passes(240), lengths, near), Passes(240)
    batch = near * size
    if 240 % batch:
        return
    parts = [order.microbatch(5, step * batch + m * size, size) for m in range(near)]
    assert sorted(sum(parts, ())) == sorted(usual.microbatch(5, step * batch, batch))
    spans = sorted((min(map(lengths.__getitem__, part)), max(map(lengths.__getitem__, part))) for part in parts)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_lengths_are_asked_for_once_and_when_they_are_needed() -> None:
    asked: list[int] = []

    def found() -> list[int]:
        asked.append(1)
        return [3, 1, 2]

    data = ByLength(TensorDataset((torch.arange(3),), ()), found, 2)
    assert (len(data), asked) == (3, [])
    assert samples_in_order(data, 0, 0, 3) == (1, 2, 0)
    samples_in_order(data, 0, 999, 3)
    assert asked == [1]
    with pytest.raises(ValueError, match="microbatches must be at least 1, got 0"):
        ByLength(data, found, 0)


def test_microbatches_of_a_pass_come_in_no_order_of_their_lengths() -> None:
    order = OrderByLength(Passes(400), range(400), 50)
    first = [order.microbatch(0, n, 8)[0] for n in range(0, 400, 8)]
    assert sorted(first) == list(range(0, 400, 8))
    rises = sum(a < b for a, b in pairwise(first))
    assert 10 < rises < 40
    assert first != [order.microbatch(0, 400 + n, 8)[0] for n in range(0, 400, 8)]


def test_there_is_less_padding() -> None:
    """Lengths as of chats: half of them below 180 tokens, some of 2,048."""
    drawn = np.random.default_rng(0).lognormal(5.2, 0.9, 4000)
    lengths = np.clip(drawn, 8, 2048).astype(int).tolist()
    shares = [padded(order, lengths, 8) for order in (Passes(4000), OrderByLength(Passes(4000), lengths, 50))]
    assert shares[0] > 0.5
    assert shares[1] < 0.12


def test_another_setting_is_another_order_and_so_is_a_mixture_beneath() -> None:
    lengths = [n * 37 % 101 for n in range(240)]
    plain = TensorDataset((torch.arange(240.0),), (torch.arange(240.0),))
    mixed = Mixture({"a": (1, plain), "b": (2, plain)})
    datasets = [plain, ByLength(plain, lengths, 4), ByLength(plain, lengths, 5), mixed, ByLength(mixed, lengths * 2, 4)]
    orders = [record_of(small_task(dataset=dataset), 0).order for dataset in datasets]
    assert len(set(orders)) == 5
    again = record_of(small_task(dataset=ByLength(plain, lengths, 4)), 0)
    assert difference(record_of(small_task(dataset=datasets[1]), 0), again) is None
    both = ByLength(mixed, lengths * 2, 4)
    assert samples_of_pass(small_task(dataset=both)) == mixed.order.samples_of_pass


class Own:
    """An order that a user brings along."""

    def __init__(self, answer: Any, samples: Any = 4) -> None:
        self.answer, self.samples_of_pass = answer, samples

    def microbatch(self, seed: int, first: int, size: int) -> Any:
        return self.answer(first, size)


def with_order(order: Any) -> TensorDataset:
    dataset = TensorDataset((torch.arange(4.0),), (torch.arange(4.0),))
    vars(dataset)["order"] = order
    return dataset


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda first, size: [0], "expected 2 numbers of its 4 samples for a microbatch, got [0]"),
        (lambda first, size: [0, 4], "expected 2 numbers of its 4 samples for a microbatch, got [0, 4]"),
        (lambda first, size: [0, 1.0], "expected 2 numbers of its 4 samples for a microbatch, got [0, 1.0]"),
        (lambda first, size: 1 / 0, "the dataset's order raised ZeroDivisionError"),
    ],
)
def test_an_order_that_is_none_is_refused(answer: Any, said: str) -> None:
    with pytest.raises(TaskError) as refused:
        samples_in_order(with_order(Own(answer)), 0, 0, 2)
    assert said in str(refused.value)


def test_an_order_of_ones_own_is_followed() -> None:
    dataset = with_order(Own(lambda first, size: [(first + n) // 2 % 4 for n in range(size)], 8))
    assert samples_in_order(dataset, 0, 4, 4) == (2, 2, 3, 3)
    assert samples_of_pass(small_task(dataset=dataset)) == 8
    assert samples_in_order(with_order("of another meaning"), 0, 0, 4) == Passes(4).microbatch(0, 0, 4)
    with pytest.raises(TaskError, match="samples_of_pass must be an integer of at least 1, got 0"):
        samples_of_pass(small_task(dataset=with_order(Own(None, 0))))


def test_models_of_the_library_find_the_lengths_in_the_mask() -> None:
    sizes = {"vocabulary": 64, "positions": 12, "width": 16, "heads": 2, "blocks": 2}
    data = {"kind": "random", "samples": 64, "padding": True, "trim": 1}
    config = {**sizes, "data": {**data, "nearLengths": 16}}
    task = load_task("bamboo_trainer.models.gpt2:build", config)
    (_, mask), _ = task.dataset.batch(range(64))
    lengths = mask.sum(1).tolist()
    assert samples_in_order(task.dataset, 0, 0, 64 // 16) != Passes(64).microbatch(0, 0, 4)
    order: Any = task.dataset
    assert padded(order.order, lengths, 4) < padded(Passes(64), lengths, 4) / 2
    for key in ("trim", "nearLengths"):
        with pytest.raises(TaskError, match=f"data.{key}: expected only with a mask of the tokens that count"):
            load_task("bamboo_trainer.models.gpt2:build", {**sizes, "data": {key: 4}})
