"""The contract of one-sided writes: who owns which memory until when, and what a loss leaves behind.

A `WriteSource` copies slots of its ring into the slots of the same numbers of a `WriteTarget`'s ring, where nobody need
take part. Both belong to one connection of a link: that is the epoch of all that follows.

- **A slot of the source** belongs to the caller until `write`, then to that write until `written` says yes.
- **A slot of the target** belongs to the source until the source's caller says on the connection that it is filled;
  then to the target's caller until that says there that it is taken. Nothing is read because it seems to be there.
- **A ring** is registered memory of its own end alone, from its making to `close`, and then withdrawn (`Ring`).
- **A timeout** is the caller's own: a write has none. Whoever waits no longer closes the end, and has learned nothing:
  the write may have landed, in part or not, or land later. So no slot is used again, and the epoch is over.
- **Cancellation** of one write does not exist, as no network takes back what it has. Closing the source gives up all of
  them; each unfinished slot of the target is undefined, and no other is touched.
- **A disconnect** is for each end to close by itself, at once, whether the peer is gone, frozen or well. The next
  connection has new ends with new rings under new names. A late write meets the withdrawn ring of its own epoch, never
  memory that is read under a newer one.
- **A failure boundary** is between any two workers that can be lost separately. No memory of a GPU is mapped across it
  (no cuda_ipc). Rings are in host memory or in a GPU's, each mapped by its own process alone and by what it has a
  network card do. Each end chooses for itself; only an implementation knows what its landings hold.

torch's own one-sided transport (`torch.distributed._transport`, pytorch/pytorch#195643, not merged as this is written)
says the same: a timeout or a cancelled wait stops the waiting and not the transfer, buffers stay until it has ended,
peers keep what they expose. It could stand behind this seam: `bind` and `to_remote_buffer` make a landing, `connect`
and `register_memory` a source, `write(async_op=True)` a transfer, of which `written` asks `is_completed`; `progress`
has nothing to do. Two things would be missing. Its `close` drains, or fails after its timeout and keeps what it has,
where this one may not wait for a peer. And those of its backends where both ends connect need an answer to the landing.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

SLOTS: Final = 4
SLOT_BYTES: Final = 4 << 20
RING_BYTES: Final = SLOTS * SLOT_BYTES

Slot = Tensor  # uint8 [SLOT_BYTES], in host memory or a GPU's


class WriteSource(Protocol):
    """The sending end. Used by one thread. Raises ConnectionError once it has lost the target."""

    def slot(self, number: int) -> Slot:
        """A part of its ring, to be filled before `write`, by a GPU as well. Not to be touched after `close`."""
        ...

    def write(self, slot: int, size: int) -> int:
        """Begin to copy the first bytes of a slot to the target. A name for the transfer."""
        ...

    def written(self, transfer: int) -> bool:
        """Is all of it in the target's memory? Moves data meanwhile, without Python's lock.

        Not to be asked again after a yes, or an error.
        """
        ...

    def close(self) -> None:
        """Give up all transfers and withdraw the ring. Waits for no peer. Nothing happens the second time."""
        ...


class WriteTarget(Protocol):
    """The receiving end. Used by one thread. Raises ConnectionError where its implementation fails."""

    def slot(self, number: int) -> Slot:
        """A part of its ring, to be read once it is said to be filled: it is as the source had it for whatever reads it
        from now on, on a GPU as well. Not to be touched after `close`.
        """
        ...

    def landing(self) -> bytes:
        """What a source needs to write into this ring; opaque to all but the implementation."""
        ...

    def progress(self) -> None:
        """Take in what is written, without Python's lock, where that does not happen by itself."""
        ...

    def close(self) -> None:
        """Withdraw the ring. Waits for no peer. Nothing happens the second time."""
        ...


class OneSided(Protocol):
    """An implementation, with rings in the memory of one device. link: a name for people."""

    @property
    def device(self) -> torch.device: ...

    def source(self, link: str, landing: bytes) -> WriteSource:
        """An end that writes to that landing. ConnectionError if it cannot be reached, or is none."""
        ...

    def target(self, link: str) -> WriteTarget: ...
