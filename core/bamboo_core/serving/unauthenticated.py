"""Connections of callers who have not proved who they are: how many there may be, and who has to go for another.

No I/O: who is to be closed is returned. A caller that hangs on to a connection, half open or idle, must not keep others
out, and one with many connections must not push out those of others: when there is no room, the address with most idle
connections loses the oldest of them.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


def network_of(host: str) -> str:
    """An address, as far as it tells callers apart: one host has all addresses of an IPv6 network of 64 bits."""
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
    """The connections of callers who have not proved who they are. room: for how many. Oldest first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._unauthenticated: dict[K, _Caller] = {}
        self._idle: Counter[str] = Counter()  # by network

    def __len__(self) -> int:
        return len(self._unauthenticated)

    def __contains__(self, key: K) -> bool:
        return key in self._unauthenticated

    def admit(self, key: K, host: str) -> K | None:
        """Takes in that caller. Returns whose connection is to be closed for it, which may be its own."""
        leaving = self.evict() if len(self._unauthenticated) >= self.room else None
        if len(self._unauthenticated) >= self.room:
            return key  # all others are being served
        caller = self._unauthenticated[key] = _Caller(network_of(host))
        self._idle[caller.network] += 1
        return leaving

    def evict(self) -> K | None:
        """One that is not being served is forgotten and returned; None if there is none."""
        if not self._idle:
            return None
        crowded = max(self._idle, key=self._idle.__getitem__)
        most = self._idle[crowded]
        found = next(k for k, g in self._unauthenticated.items() if not g.busy and self._idle[g.network] == most)
        self.remove(found)
        return found

    def mark(self, key: K, *, busy: bool) -> None:
        """Notes whether the caller's request is worked on now (`busy`), or has been answered."""
        caller = self._unauthenticated.get(key)
        if caller is not None and caller.busy != busy:
            caller.busy = busy
            self._count(caller.network, -1 if busy else 1)

    def remove(self, key: K) -> None:
        """Forgets a caller that has gone, or is known now."""
        caller = self._unauthenticated.pop(key, None)
        if caller is not None and not caller.busy:
            self._count(caller.network, -1)

    def _count(self, network: str, change: int) -> None:
        self._idle[network] += change
        if not self._idle[network]:
            del self._idle[network]
