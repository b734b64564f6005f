"""File descriptors: as many as this process may have, and who gets how many of them.

Every connection takes one. A process that has none left can neither be reached nor reach the API server, so what
unknown callers may take is a share, and never the rest.
"""

import resource
from dataclasses import dataclass

MOST = 1 << 20  # some systems allow 2**30, and tables of that size
LEAST_SHARE = 16


def raise_limit() -> int:
    """Raises the soft limit to the hard one. Returns what holds from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorShares:
    """The descriptors that callers may use: at the workers' port those who have not proved who they are
    (`unauthenticated`), and workers; at the web port `visitors`.
    """

    unauthenticated: int
    visitors: int
    workers: int

    @classmethod
    def of(cls, limit: int, reserved: int) -> "DescriptorShares":
        """The shares of so many descriptors. reserved: what the process itself needs, for the API server, its files,
        and what it logs.
        """
        free = max(0, limit - reserved)
        unauthenticated, visitors = max(LEAST_SHARE, min(2048, free // 4)), max(LEAST_SHARE, min(512, free // 8))
        return cls(
            unauthenticated=unauthenticated,
            visitors=visitors,
            workers=max(LEAST_SHARE, free - unauthenticated - visitors),
        )
