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
    """The event that a link to or from a peer broke, or was not formed. Its sending end tries again unless closed."""

    peer: WorkerId


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The event that a link to or from a peer works after a failure. Frames sent before, either way, may be lost."""

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
    """The exchange of frames between a worker and its peers. Only `close` waits. No method raises because of a peer."""

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """Send or queue a frame; its tensors must not change any more. Drop it for an unknown peer or a broken link."""
        ...

    def is_sending(self, peer: WorkerId, lane: Lane) -> bool:
        """Return whether a frame to that peer on this lane waits or is on its way."""
        ...

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """Set the newest plan's workers except this one. Close links to and from others, and refuse their new links.

        peers: each worker's address (host and port), which never changes.
        """
        ...

    def close(self, flush_seconds: float) -> None:
        """Send queued frames for at most `flush_seconds`, close all links, and wait some seconds for threads to end."""
        ...
