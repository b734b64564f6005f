"""The limit of open file descriptors, and its shares for workers, visitors and unauthenticated callers."""

import resource

import pytest

from bamboo_core.serving.descriptors import DescriptorShares, raise_limit
from bamboo_operator.process import RESERVED, WATCHES


@pytest.mark.parametrize("namespaces", [1, 100])
@pytest.mark.parametrize("limit", [64, 1024, 2048, 4096, 65_536, 1 << 20])
def test_shares_leave_the_operator_its_own(limit: int, namespaces: int) -> None:
    reserved = RESERVED + WATCHES * namespaces
    shares = DescriptorShares.of(limit, reserved)
    if limit >= (1024 if namespaces == 1 else 2048):
        assert shares.unauthenticated + shares.visitors + shares.workers + reserved <= limit
        assert min(shares.unauthenticated, shares.visitors) >= 32


def test_a_thousand_workers_need_what_the_page_says() -> None:
    """The limits in docs/operating.md allow 1,000 workers: 2,048 descriptors, or 4,096 with 100 watched namespaces."""
    assert DescriptorShares.of(2048, RESERVED + WATCHES).workers >= 1000
    assert DescriptorShares.of(4096, RESERVED + 100 * WATCHES).workers >= 1000


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_limit() == min(before[1], 1 << 20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 1 << 20), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
