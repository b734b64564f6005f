"""Several datasets in one training: whose sample is which, and the same bits whatever the grid."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.data_record import difference
from bamboo_trainer.data import Mixture, TensorDataset
from bamboo_trainer.data.record import record_of
from bamboo_trainer.task import TrainingFacts
from stage_kit import small_task


def numbers(first: int, count: int) -> TensorDataset:
    values = torch.arange(first, first + count)
    return TensorDataset((values[:, None].float(),), (values,))


def taken(mixed: Mixture, *indices: int) -> list[int]:
    (_, (values,)) = mixed.batch(indices)
    return values.tolist()


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 12)), min_size=2, max_size=5))
def test_each_source_has_its_share_and_is_visited_as_a_whole(sources: list[tuple[float, int]]) -> None:
    """Its samples come equally often, give or take one. Shares are exact to a thousandth."""
    mixed = Mixture([(weight, numbers(100 * n, length)) for n, (weight, length) in enumerate(sources)])
    found, whole = Counter(taken(mixed, *range(len(mixed)))), sum(weight for weight, _ in sources)
    for number, (weight, length) in enumerate(sources):
        own = [found[100 * number + sample] for sample in range(length)]
        assert min(own) >= 1
        assert max(own) - min(own) <= 1
        assert abs(sum(own) / len(mixed) - weight / whole) < 0.002 * len(sources)


def test_a_simple_ratio_is_exact_and_spread_evenly() -> None:
    mixed = Mixture([(0.75, numbers(0, 6)), (0.25, numbers(100, 2))])
    assert taken(mixed, *range(len(mixed))) == [0, 1, 100, 2, 3, 4, 101, 5]
    assert len(Mixture([(2, numbers(0, 6)), (1, numbers(100, 1))])) == 9
    assert taken(Mixture([(1, numbers(0, 3)), (1, numbers(100, 2))]), *range(6)) == [0, 100, 1, 101, 2, 100]


def test_samples_come_as_they_were_asked_for() -> None:
    mixed = Mixture([(1, numbers(0, 4)), (0.5, numbers(100, 3))])
    (x,), (values,) = mixed.batch([6, 1, 3, 4])
    assert values.tolist() == [one for index in (6, 1, 3, 4) for one in taken(mixed, index)]
    assert x.flatten().tolist() == values.tolist()
    assert mixed.tokens_per_sample is None


def test_an_epoch_is_a_pass_over_the_mixture() -> None:
    mixed = Mixture([(1, numbers(0, 40)), (1, numbers(0, 10))])
    facts = TrainingFacts(steps=None, epochs=3, global_batch_size=10, micro_batch_size=5)
    assert (len(mixed), facts.steps_with(mixed)) == (80, 24)


@pytest.mark.parametrize("weight", [0.3001, 0.2])
def test_other_weights_are_other_data(weight: float) -> None:
    def mixed(other: float) -> Any:
        return record_of(small_task(dataset=Mixture([(0.7, numbers(0, 4000)), (other, numbers(0, 500))])), 0)

    assert difference(mixed(0.3), mixed(0.3)) is None
    assert difference(mixed(0.3), mixed(weight)) is not None
