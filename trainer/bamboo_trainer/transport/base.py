"""The interface between the engine and the network: a transport and its events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport.wire import Lane


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The event that a link to or from a peer broke. Its sender forms it again while both workers are in the plan."""

    peer: WorkerId


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The event that a broken link to or from a peer works again. Frames sent before may be lost: send them again."""

    peer: WorkerId


@dataclass(frozen=True, slots=True)
class Arrived:
    sender: WorkerId
    frame: Frame


Event = LinkDown | LinkUp | Arrived
Deliver = Callable[[Event], None]
Buffer = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # allocates host memory for an arriving tensor


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in ordinary host memory, not pinned for a device."""
    return torch.empty(shape, dtype=dtype)


class Transport(Protocol):
    """The exchange of frames between a worker and its peers. It never blocks the engine or raises because of a peer."""

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """Queue a frame, whose tensors must not change any more. Drop it if the peer is unknown or its link is down."""
        ...

    def is_sending(self, peer: WorkerId, lane: Lane) -> bool:
        """Return whether a frame on this lane would wait behind another one to that peer."""
        ...

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """Set the workers of the newest plan: close links to and from all other workers, and refuse their new links.

        peers: each worker's address (host and port), which never changes.
        """
        ...

    def close(self, flush_seconds: float) -> None:
        """Send queued frames for at most `flush_seconds`, then close every link and end every thread."""
        ...
