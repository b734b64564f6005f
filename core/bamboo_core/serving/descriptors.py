"""File descriptors: the process's limit, and the shares of its callers. Every connection takes one. A process without
free descriptors can neither be reached nor reach the API server, so unknown callers get only a share.
"""

import resource
from dataclasses import dataclass

MOST = 1 << 20  # some systems allow 2**30, and allocate tables of that size
LEAST_SHARE = 16


def raise_limit() -> int:
    """Raise the soft limit of file descriptors to the hard one, at most MOST. Return the soft limit, at most MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorShares:
    """Numbers of descriptors: for unauthenticated callers and workers at the workers' port, and for visitors at the
    web port.
    """

    unauthenticated: int
    visitors: int
    workers: int

    @classmethod
    def of(cls, limit: int, reserved: int) -> "DescriptorShares":
        """Return shares of `limit` descriptors, each at least LEAST_SHARE. reserved: for API server, files and logs."""
        free = max(0, limit - reserved)
        unauthenticated, visitors = max(LEAST_SHARE, min(2048, free // 4)), max(LEAST_SHARE, min(512, free // 8))
        return cls(
            unauthenticated=unauthenticated,
            visitors=visitors,
            workers=max(LEAST_SHARE, free - unauthenticated - visitors),
        )
