"""What happens at the workers' control channels. The coordinator takes these as events."""

from dataclasses import dataclass

from bamboo_core.control.protocol import Hello, Message
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker's channel opened and said Hello (first time or again after a cut)."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    worker: WorkerId


ChannelEvent = WorkerJoined | Received | ChannelClosed
