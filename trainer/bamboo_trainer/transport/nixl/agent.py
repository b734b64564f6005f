"""A NIXL agent of one end of one link, with the ring of registered memory from or into which bodies are written.

An agent belongs to one end of one connection and goes with it. So whatever a peer was told of an earlier connection
reaches nothing any more, and nobody but the link's own thread ever calls one. It has no thread that polls (NIXL's
"progress thread" takes a core as long as it exists): data moves while `written` or `progress` is called.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.nixl.library import library

logger = logging.getLogger(__name__)

BACKEND = "UCX"
SLOTS = 4
SLOT_BYTES = 4 << 20
RING_BYTES = SLOTS * SLOT_BYTES

Bytes = NDArray[np.uint8]


class NixlError(ConnectionError):
    """NIXL could not do what a link needs of it; the link is lost."""


@dataclass(frozen=True, slots=True)
class Landing:
    """The place of a receiver's ring."""

    metadata: bytes  # NIXL's own, opaque
    address: int  # of the ring, in the receiver's memory


class NixlAgent:
    """Raises NixlError wherever NIXL fails."""

    def __init__(self, link: str) -> None:
        nixl = library()
        self._ring: Bytes = np.empty(RING_BYTES, np.uint8)
        self._remote, self._landing = "", 0
        self._transfers: dict[int, Any] = {}
        self._posted = 0
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        self._agent = _call("start", nixl.nixl_agent, f"{link}-{secrets.token_hex(8)}", settings)
        if BACKEND not in self._agent.backends:
            raise NixlError(f"NIXL has no backend {BACKEND} here")
        memory = [(self._ring.ctypes.data, RING_BYTES, 0, "")]
        self._registered = _call("register memory", self._agent.register_memory, memory, "DRAM")

    def slot(self, number: int) -> Bytes:
        """A part of the ring."""
        return self._ring[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]

    def landing(self) -> Landing:
        """What a peer needs to write into this ring."""
        return Landing(_call("describe itself", self._agent.get_agent_metadata), self._ring.ctypes.data)

    def reach(self, landing: Landing) -> None:
        """Lets `write` go to that landing from now on."""
        self._remote = _call("reach the peer", self._agent.add_remote_agent, landing.metadata)
        self._landing = landing.address

    def write(self, slot: int, size: int) -> int:
        """Begin to copy the first bytes of a slot into the peer's slot of the same number. A name for the transfer."""
        start = slot * SLOT_BYTES
        here = self._agent.get_xfer_descs([(self._ring.ctypes.data + start, size, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(self._landing + start, size, 0)], "DRAM")
        self._posted += 1
        self._transfers[self._posted] = _call(
            "prepare a transfer", self._agent.initialize_xfer, "WRITE", here, there, self._remote
        )
        _call("begin a transfer", self._agent.transfer, self._transfers[self._posted])
        return self._posted

    def written(self, transfer: int) -> bool:
        """Is it there? Moves data meanwhile, without Python's lock. Not to be asked again after a yes."""
        state = _call("go on with a transfer", self._agent.check_xfer_state, self._transfers[transfer])
        if state == "PROC":
            return False
        if state != "DONE":
            raise NixlError(f"NIXL ended a transfer in state {state}")
        _call("end a transfer", self._agent.release_xfer_handle, self._transfers.pop(transfer))
        return True

    def progress(self) -> None:
        """Take in what peers write, without Python's lock."""
        _call("take in data", self._agent.get_new_notifs)

    def close(self) -> None:
        """Give up all transfers and end the connections; takes milliseconds, also if a peer is frozen.

        The ring is no longer registered when it is freed.
        """
        if self._agent is None:
            return
        while self._transfers:
            self._suppressed(self._agent.release_xfer_handle, self._transfers.popitem()[1])
        if self._remote:
            self._suppressed(self._agent.remove_remote_agent, self._remote)
        self._suppressed(self._agent.deregister_memory, self._registered)
        self._registered = self._agent = None

    def _suppressed(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            _call("close", function, *arguments)
        except NixlError as error:  # of a peer that is gone; the agent itself goes now
            logger.debug("%s", error)


def prove() -> None:
    """Proves that agents can be made on this machine. Raises TransportUnavailable if they cannot."""
    try:
        NixlAgent("trial").close()
    except NixlError as error:
        raise TransportUnavailable(f"spec.topology.transport: {error}") from error


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
