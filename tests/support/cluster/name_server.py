"""The cluster's DNS server, for the names of Services only."""

import asyncio
import socket
import struct
from collections.abc import Mapping

IPV4 = 1
PORT = 53
SECONDS = 1  # for which an answer may be kept


class NameServer(asyncio.DatagramProtocol):
    """A DNS server. names: IPv4 addresses by name; its owner replaces them as Services change."""

    def __init__(self) -> None:
        self.names: Mapping[str, list[str]] = {}
        self._transport: asyncio.DatagramTransport

    async def open(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=(address, PORT))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if reply := answer(data, self.names):
            self._transport.sendto(reply, addr)


def answer(question: bytes, names: Mapping[str, list[str]]) -> bytes | None:
    """Return a DNS query's reply: IPv4 addresses (none for other types) or NXDOMAIN; None for a malformed query."""
    try:
        labels, end = _labels(question)
        (kind,) = struct.unpack_from("!H", question, end)
    except (IndexError, struct.error, UnicodeDecodeError):
        return None
    known = names.get(".".join(labels).lower())
    addresses = known if known and kind == IPV4 else []
    no_such_name = 0 if known else 3
    head = question[:2] + struct.pack("!5H", 0x8580 | no_such_name, 1, len(addresses), 0, 0)
    records = (struct.pack("!3HIH", 0xC00C, IPV4, 1, SECONDS, 4) + socket.inet_aton(each) for each in addresses)
    return head + question[12 : end + 4] + b"".join(records)


def _labels(question: bytes) -> tuple[list[str], int]:
    """Return the labels of the requested name, and the offset at which it ends."""
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return labels, at + 1
