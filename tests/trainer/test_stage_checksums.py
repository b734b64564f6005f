"""A tensor's bits as one number."""

import pytest
import torch

from bamboo_trainer.stage.checksums import CHUNK, checksum


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 2 * CHUNK + 7])
def test_a_sum_is_that_of_the_bits(dtype: torch.dtype, size: int) -> None:
    one = (torch.arange(size) % 2).to(dtype)
    assert checksum(one) == checksum(one.clone()) == checksum(one.reshape(1, -1))
    if size:
        other = one.clone()
        other[size // 2] = one[size // 2] == 0
        assert checksum(one) != checksum(other)
    if size > 2:
        assert checksum(one) != checksum(one.flip(0)) or torch.equal(one, one.flip(0))
        assert checksum(one[1:]) == checksum(one[1:].clone())


def test_a_sum_sees_what_cancels_out() -> None:
    """Values that change places, signs of zero, and one up against one down."""
    values = torch.ones(100_000)
    for a, b, changed in ((3, 70_000, 2.0), (5, 5 + 2 * CHUNK, 4.0)):
        one, other = values.clone(), values.clone()
        one[a], other[b] = changed, changed
        assert checksum(one) != checksum(other)
    assert checksum(torch.zeros(8)) != checksum(-torch.zeros(8))
    up_and_down = values.clone()
    up_and_down[10], up_and_down[11] = 1 + 2**-23, 1 - 2**-23
    assert checksum(values) != checksum(up_and_down)


def test_a_device_comes_to_the_sum_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (0, 5, 8, 1001)]
    here = [checksum(one) for one in tensors]
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert [checksum(one) for one in tensors] == here
