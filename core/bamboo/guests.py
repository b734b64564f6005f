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


def neighbourhood(host: str) -> str:
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
class _Guest:
    place: str
    busy: bool = False


class Guests(Generic[K]):
    """room: for how many. Oldest first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._guests: dict[K, _Guest] = {}
        self._idle: Counter[str] = Counter()  # by place

    def __len__(self) -> int:
        return len(self._guests)

    def __contains__(self, key: K) -> bool:
        return key in self._guests

    def come(self, key: K, host: str) -> K | None:
        """Takes in that caller. Returns whose connection is to be closed for it, which may be its own."""
        leaving = self.give_way() if len(self._guests) >= self.room else None
        if len(self._guests) >= self.room:
            return key  # all others are being served
        guest = self._guests[key] = _Guest(neighbourhood(host))
        self._idle[guest.place] += 1
        return leaving

    def give_way(self) -> K | None:
        """One that is not being served is forgotten and returned; None if there is none."""
        if not self._idle:
            return None
        crowded = max(self._idle, key=self._idle.__getitem__)
        most = self._idle[crowded]
        found = next(k for k, g in self._guests.items() if not g.busy and self._idle[g.place] == most)
        self.leave(found)
        return found

    def served(self, key: K, *, busy: bool) -> None:
        """Its request is worked on now, or has been answered."""
        guest = self._guests.get(key)
        if guest is not None and guest.busy != busy:
            guest.busy = busy
            self._count(guest.place, -1 if busy else 1)

    def leave(self, key: K) -> None:
        """It has gone, or is known now."""
        guest = self._guests.pop(key, None)
        if guest is not None and not guest.busy:
            self._count(guest.place, -1)

    def _count(self, place: str, change: int) -> None:
        self._idle[place] += change
        if not self._idle[place]:
            del self._idle[place]
