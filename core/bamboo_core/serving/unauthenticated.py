"""Unauthenticated connections: their limit, and which one to close for another.

No I/O: the connection to close is returned. A caller that holds half-open or idle connections must not keep others out,
and one with many connections must not displace others': if there is no room, the address with the most idle connections
loses its oldest.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


def network_of(host: str) -> str:
    """Return the network that identifies a caller: an IPv6 host may use all addresses of a 64-bit network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@dataclass(slots=True)
class _Caller:
    network: str
    busy: bool = False


class UnauthenticatedConnections(Generic[K]):
    """The connections of unauthenticated callers, oldest first. room: the most there may be."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._unauthenticated: dict[K, _Caller] = {}
        self._idle: Counter[str] = Counter()  # by network

    def __len__(self) -> int:
        return len(self._unauthenticated)

    def __contains__(self, key: K) -> bool:
        return key in self._unauthenticated

    def admit(self, key: K, host: str) -> K | None:
        """Add a caller. Return the connection to close for it, which may be its own."""
        leaving = self.evict() if len(self._unauthenticated) >= self.room else None
        if len(self._unauthenticated) >= self.room:
            return key  # all others are being served
        caller = self._unauthenticated[key] = _Caller(network_of(host))
        self._idle[caller.network] += 1
        return leaving

    def evict(self) -> K | None:
        """Remove and return a connection that is not being served; None if there is none."""
        if not self._idle:
            return None
        crowded = max(self._idle, key=self._idle.__getitem__)
        most = self._idle[crowded]
        oldest = next(k for k, g in self._unauthenticated.items() if not g.busy and self._idle[g.network] == most)
        self.remove(oldest)
        return oldest

    def mark(self, key: K, *, busy: bool) -> None:
        """Record whether the caller's request is in progress (`busy`) or answered."""
        caller = self._unauthenticated.get(key)
        if caller is not None and caller.busy != busy:
            caller.busy = busy
            self._count(caller.network, -1 if busy else 1)

    def remove(self, key: K) -> None:
        """Remove a caller that has gone or is authenticated."""
        caller = self._unauthenticated.pop(key, None)
        if caller is not None and not caller.busy:
            self._count(caller.network, -1)

    def _count(self, network: str, change: int) -> None:
        self._idle[network] += change
        if not self._idle[network]:
            del self._idle[network]
