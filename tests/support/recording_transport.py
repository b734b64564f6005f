"""A transport that goes nowhere and a coordinator that answers nothing: they keep what they are given."""

from collections.abc import Mapping

from bamboo_core.control.protocol import Message
from bamboo_trainer.frames import Frame
from bamboo_trainer.transport.wire import Lane


class RecordingTransport:
    """frames: with their receivers, in order. addresses: of the peers, as they were said last."""

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
        """What was sent since the last call."""
        found, self.frames = self.frames, []
        return found


class Told(list[Message]):
    """See `Coordinator`."""

    def tell(self, message: Message) -> None:
        self.append(message)
