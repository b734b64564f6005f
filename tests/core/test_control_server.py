"""The control server's token bucket, which delays the messages of a worker that sends too many."""

import pytest

from bamboo_core.control.server import TokenBucket


def test_a_worker_that_sends_too_much_waits() -> None:
    allowance = TokenBucket(rate=10, burst=5, now=0.0)
    assert [allowance.wait(0.0) for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2])
    assert allowance.wait(100.0) == 0
