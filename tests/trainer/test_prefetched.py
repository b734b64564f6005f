"""A dataset that is read ahead: how many readers it may have, and that it is the same dataset."""

import pytest
import torch

from bamboo_trainer.data import TensorDataset
from bamboo_trainer.data.prefetched import Prefetched

DATA = TensorDataset((torch.arange(6.0).reshape(3, 2),), (torch.arange(3.0),))


def test_without_readers_nothing_is_read_ahead() -> None:
    with pytest.raises(ValueError, match="readers must be from 1 to 64, got 0"):
        Prefetched(DATA, readers=0)
    with pytest.raises(ValueError, match="readAhead must be from 1 to 256, got 0"):
        Prefetched(DATA, ahead=0)


def test_its_samples_are_the_datasets() -> None:
    wrapped = Prefetched(DATA, readers=3)
    assert (len(wrapped), wrapped.ahead) == (3, 6)
    for mine, its in zip(wrapped.batch([2, 0]), DATA.batch([2, 0]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
