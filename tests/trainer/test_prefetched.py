"""A dataset that is read ahead: how many readers it may have, and that it is the same dataset."""

import pytest
import torch

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.data.prefetched import MOST_AHEAD, MOST_READERS, Prefetched

DATA = TensorDataset((torch.arange(6.0).reshape(3, 2),), (torch.arange(3.0),))


def test_its_samples_are_the_datasets() -> None:
    wrapped = Prefetched(DATA, readers=3)
    assert (len(wrapped), wrapped.ahead, wrapped.processes) == (3, 6, True)
    for mine, its in zip(wrapped.batch([2, 0]), DATA.batch([2, 0]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"readers": 0}, f"readers must be from 1 to {MOST_READERS}, got 0"),
        ({"readers": MOST_READERS + 1}, "readers must be"),
        ({"ahead": 0}, f"readAhead must be from 1 to {MOST_AHEAD}, got 0"),
        ({"ahead": MOST_AHEAD + 1}, "readAhead must be"),
    ],
)
def test_numbers_that_cannot_be_are_named(given: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Prefetched(DATA, **given)  # type: ignore[arg-type]
