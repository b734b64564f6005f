"""One-sided writes by NIXL agents.

An agent belongs to one end of one connection and goes with it. So whatever a peer was told of an earlier connection
reaches nothing any more, and nobody but the link's own thread ever calls one. It has no thread that polls (NIXL's
"progress thread" takes a core as long as it exists): data moves while `written` or `progress` is called.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import torch

from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.nixl.library import library
from bamboo_trainer.transport.one_sided.contract import RING_BYTES, SLOT_BYTES, Slot
from bamboo_trainer.transport.one_sided.ring import ring_on

logger = logging.getLogger(__name__)

BACKEND = "UCX"
CPU = torch.device("cpu")
MOST_GPUS = 1 << 10


class NixlError(ConnectionError):
    """NIXL could not do what a link needs of it; the link is lost."""


class MemoryKind(StrEnum):
    """Where a ring is, in NIXL's words."""

    HOST = "DRAM"
    GPU = "VRAM"


@dataclass(frozen=True, slots=True)
class Landing:
    """The place of a receiver's ring."""

    metadata: bytes  # NIXL's own, opaque
    address: int  # of the ring, in the receiver's memory
    memory: MemoryKind = MemoryKind.HOST
    number: int = 0  # of the receiver's GPU that has it


_DECODER = msgspec.msgpack.Decoder(Landing)


def parse_landing(raw: bytes) -> Landing:
    """Raises NixlError."""
    try:
        landing = _DECODER.decode(raw)
    except msgspec.MsgspecError as error:
        raise NixlError(f"landing: {error}") from error
    if not 0 < landing.address < 1 << 63 or not landing.metadata or not 0 <= landing.number < MOST_GPUS:
        raise NixlError("landing: no memory")
    return landing


class _Agent:
    """With its ring, registered, and the transfers that it has begun. Raises NixlError wherever NIXL fails."""

    def __init__(self, link: str, device: torch.device) -> None:
        nixl = library()
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        self._agent = _call("start", nixl.nixl_agent, f"{link}-{secrets.token_hex(8)}", settings)
        if BACKEND not in self._agent.backends:
            raise NixlError(f"NIXL has no backend {BACKEND} here")
        self._remote, self._transfers, self._posted = "", dict[int, Any](), 0
        self._memory = MemoryKind.HOST if device.type == "cpu" else MemoryKind.GPU
        self._number = device.index or 0
        self._ring = ring_on(device)
        memory = [(self._ring.address, RING_BYTES, self._number, "")]
        try:
            self._registered = _call("register memory", self._agent.register_memory, memory, self._memory.value)
        except NixlError:
            self._ring.withdraw()
            raise

    def slot(self, number: int) -> Slot:
        return self._ring.slot(number)

    def place(self) -> Landing:
        """Where others reach its ring."""
        metadata = _call("describe itself", self._agent.get_agent_metadata)
        return Landing(metadata, self._ring.address, self._memory, self._number)

    def reach(self, landing: Landing) -> None:
        self._remote = _call("reach the peer", self._agent.add_remote_agent, landing.metadata)

    def write(self, landing: Landing, start: int, size: int) -> int:
        """A name for the transfer of so many bytes from there on in the ring."""
        here = self._descriptors(self._ring.address + start, size, self._number, self._memory)
        there = self._descriptors(landing.address + start, size, landing.number, landing.memory)
        made = _call("prepare a transfer", self._agent.initialize_xfer, "WRITE", here, there, self._remote)
        self._posted += 1
        self._transfers[self._posted] = made
        _call("begin a transfer", self._agent.transfer, made)
        return self._posted

    def _descriptors(self, address: int, size: int, number: int, memory: MemoryKind) -> Any:
        return self._agent.get_xfer_descs([(address, size, number)], memory.value)

    def written(self, transfer: int) -> bool:
        state = _call("go on with a transfer", self._agent.check_xfer_state, self._transfers[transfer])
        if state == "PROC":
            return False
        made = self._transfers.pop(transfer)
        _call("end a transfer", self._agent.release_xfer_handle, made)
        if state != "DONE":
            raise NixlError(f"NIXL ended a transfer in state {state}")
        return True

    def at_rest(self) -> bool:
        """Have all transfers ended, in whatever way? Moves those that have not."""
        for transfer in list(self._transfers):
            try:
                self.written(transfer)
            except NixlError as error:  # which is an end, too
                logger.debug("%s", error)
                if transfer in self._transfers:
                    self._suppressed(self._agent.release_xfer_handle, self._transfers.pop(transfer))
        return not self._transfers

    def progress(self) -> None:
        _call("take in data", self._agent.get_new_notifs)

    def close(self) -> None:
        """End the connections, and withdraw the ring once nothing of NIXL touches it any more.

        Takes milliseconds, also if a peer is frozen.
        """
        if self._agent is None:
            return
        if self._remote:
            self._suppressed(self._agent.remove_remote_agent, self._remote)
        self._suppressed(self._agent.deregister_memory, self._registered)
        self._registered = self._agent = None
        self._ring.withdraw()

    def _suppressed(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            _call("close", function, *arguments)
        except NixlError as error:  # of a peer that is gone; the agent itself goes now
            logger.debug("%s", error)


class UnfinishedWrites:
    """Agents whose links have ended while they wrote. Any thread may use it.

    UCX cannot take a write back, and its end looks at how the memory was registered: where that is gone, the process
    is lost (ai-dynamo/nixl#2048). So they stay as they are until their writes have ended, which is when the peer has
    taken them or its end is noticed. Whenever another end is made or closed they are looked at.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: list[_Agent] = []

    def close(self, agent: _Agent) -> None:
        """Close it now if it is at rest, else later."""
        with self._lock:
            self._agents.append(agent)
        self.look()

    def look(self) -> int:
        """Close those that are at rest by now; how many are not."""
        with self._lock:
            for agent in [agent for agent in self._agents if agent.at_rest()]:
                agent.close()
                self._agents.remove(agent)
            return len(self._agents)


class NixlSource:
    """See WriteSource."""

    def __init__(self, link: str, landing: Landing, unfinished: UnfinishedWrites, device: torch.device) -> None:
        self._landing, self._unfinished = landing, unfinished
        self._agent, self._closed = _Agent(link, device), False
        try:
            self._agent.reach(landing)
        except NixlError:
            self._agent.close()
            raise

    def slot(self, number: int) -> Slot:
        """See WriteSource."""
        return self._agent.slot(number)

    def write(self, slot: int, size: int) -> int:
        """See WriteSource."""
        return self._agent.write(self._landing, slot * SLOT_BYTES, size)

    def written(self, transfer: int) -> bool:
        """See WriteSource."""
        return self._agent.written(transfer)

    def close(self) -> None:
        """See WriteSource."""
        if not self._closed:
            self._closed = True
            self._unfinished.close(self._agent)


class NixlTarget(_Agent):
    """See WriteTarget. flush: makes what the network has written to a GPU visible there."""

    def __init__(self, link: str, device: torch.device, flush: Callable[[], None]) -> None:
        super().__init__(link, device)
        self._flush = flush

    def slot(self, number: int) -> Slot:
        """See WriteTarget."""
        self._flush()
        return super().slot(number)

    def landing(self) -> bytes:
        """See WriteTarget."""
        return msgspec.msgpack.encode(self.place())


class Nixl:
    """See OneSided. Raises TransportUnavailable where no agent can be made. flush: see NixlTarget."""

    def __init__(self, device: torch.device = CPU, flush: Callable[[], None] = lambda: None) -> None:
        self.device, self._flush, self.unfinished = device, flush, UnfinishedWrites()
        try:
            self.target("trial").close()
        except OSError as error:
            raise TransportUnavailable(f"spec.topology.transport: {error}") from error

    def source(self, link: str, landing: bytes) -> NixlSource:
        self.unfinished.look()
        return NixlSource(link, parse_landing(landing), self.unfinished, self.device)

    def target(self, link: str) -> NixlTarget:
        self.unfinished.look()
        return NixlTarget(link, self.device, self._flush)


def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call; NixlError if it fails, which holds none of the library's objects, so that the agent
    can go.
    """
    try:
        return function(*arguments)
    except Exception as error:  # the library's errors have no other base
        problem = f"NIXL cannot {what}: {type(error).__name__}: {error}"
    del function, arguments  # which the error's traceback would keep
    raise NixlError(problem)
