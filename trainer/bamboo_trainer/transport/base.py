"""The seam between the engine and the network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.frames.frame import Frame, FrameKind


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A link to that peer broke. The transport goes on trying to form it again while the peer is in the plan."""

    peer: WorkerId


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link that had broken stands again; what was sent in between may be lost and must be sent again."""

    peer: WorkerId


@dataclass(frozen=True, slots=True)
class Arrived:
    sender: WorkerId
    frame: Frame


Event = LinkDown | LinkUp | Arrived
Deliver = Callable[[Event], None]
Buffer = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # makes room in host memory for what arrives


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that needs no device's attention."""
    return torch.empty(shape, dtype=dtype)


class Transport(Protocol):
    """Never blocks the engine, never raises because of a peer."""

    def send(self, peer: WorkerId, frame: Frame) -> None:
        """Queue a frame. Its tensors must not be written any more. Dropped if the peer is not known or is down."""
        ...

    def is_sending(self, peer: WorkerId, kind: FrameKind) -> bool:
        """Is something queued for a peer, or on its way out, that a frame of this kind would come behind?"""
        ...

    def peers(self, peers: Mapping[WorkerId, tuple[str, int]]) -> None:
        """The workers of the newest plan: links to and from all others are closed and refused from now on.

        Each with its address (host and port), which it has for life.
        """
        ...

    def close(self, flush_seconds: float) -> None:
        """Send what is queued for at most that long, then close every link and thread."""
        ...
