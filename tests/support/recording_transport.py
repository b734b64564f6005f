"""A transport and a channel to the coordinator that record frames and messages."""

from collections.abc import Mapping

from bamboo_core.control.protocol import Message
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport.wire import Lane


class RecordingTransport:
    """A `Transport` that records the frames it is given instead of sending them.

    frames: pairs (receiver, frame) since the last `take`, in order. addresses: the last argument of `peers`.
    """

    def __init__(self) -> None:
        self.frames: list[tuple[str, Frame]] = []
        self.addresses: Mapping[str, tuple[str, int]] = {}

    def send(self, peer: str, frame: Frame) -> None:
        self.frames.append((peer, frame))

    def is_sending(self, peer: str, lane: Lane) -> bool:
        return False

    def peers(self, peers: Mapping[str, tuple[str, int]]) -> None:
        self.addresses = peers

    def close(self, flush_seconds: float) -> None:
        raise AssertionError("nobody closes it")

    def take(self) -> list[tuple[str, Frame]]:
        """Return the pairs (receiver, frame) since the last call."""
        found, self.frames = self.frames, []
        return found


class Told(list[Message]):
    """A channel to the coordinator that records messages; implements `Coordinator`."""

    def tell(self, message: Message) -> None:
        self.append(message)
