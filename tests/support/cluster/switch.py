"""A bridge between the nodes and this machine, in a network namespace that lasts as long as the process that holds it.

This machine sees one end of a veth pair. The other end is in that namespace, so both ends vanish with it.
"""

import asyncio
import os
from pathlib import Path

from cluster import children
from cluster.addresses import NODES, Addresses

POLL_SECONDS = 0.02
START_SECONDS = 30


class Switch:
    def __init__(self, addresses: Addresses, folder: Path) -> None:
        self.addresses, self.folder = addresses, folder
        self.holder: children.Child

    async def open(self) -> None:
        argv = ["unshare", "--net", "sleep", "infinity"]
        self.holder = await children.start(argv, self.folder / "switch.log")
        await until_in_another_network(self.holder.pid)
        link, pid = self.addresses.link, str(self.holder.pid)
        await ip("link", "add", link, "type", "veth", "peer", "name", "machine", "netns", pid)
        await self._inside("link", "add", "switch", "type", "bridge")
        await self._inside("link", "set", "switch", "up")
        await self._inside("link", "set", "machine", "master", "switch", "up")
        await ip("address", "add", f"{self.addresses.machine}/24", "dev", link)
        await ip("link", "set", link, "up")
        routes = (f"route add {self.addresses.pods(each)} via {self.addresses.node(each)} dev {link}" for each in NODES)
        await run("ip", "-batch", "-", given="\n".join(routes))

    async def close(self) -> None:
        await children.stop(self.holder, seconds=1)

    async def plug_in(self, number: int, pid: int) -> None:
        """Connect a node to the bridge: create eth0 in the network namespace of its process `pid`."""
        port = _port(number)
        await self._inside("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        await self._inside("link", "set", port, "master", "switch", "up")

    async def unplug(self, number: int) -> None:
        """Remove a node's eth0 at once. The kernel would only remove it some time after the node's end."""
        await self._inside("link", "delete", _port(number))

    async def _inside(self, *arguments: str) -> None:
        await run("nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "ip", *arguments)


def _port(number: int) -> str:
    return f"node{number}"


async def ip(*arguments: str) -> str:
    return await run("ip", *arguments)


async def run(*argv: str, given: str | None = None) -> str:
    """Run a command, and return its output and errors; if it fails, raise RuntimeError with both. given: its input."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate(None if given is None else given.encode())
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}: {said.decode().strip()}")
    return said.decode()


async def until_in_another_network(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    async with asyncio.timeout(START_SECONDS):
        while os.readlink(f"/proc/{pid}/ns/net") == own:
            await asyncio.sleep(POLL_SECONDS)
