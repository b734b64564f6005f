"""Who says too much is slowed down."""

import pytest

from bamboo_core.control.server import TokenBucket


def test_who_says_too_much_is_slowed_down() -> None:
    allowance = TokenBucket(rate=10, burst=5, now=0.0)
    assert [allowance.wait(0.0) for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2])
    assert allowance.wait(100.0) == 0
