"""Events of the workers' control channels, which the coordinator processes."""

from dataclasses import dataclass

from bamboo_core.control.protocol import Hello, Message
from bamboo_core.planning.plan import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker's channel opened and sent Hello (for the first time, or after a reconnection)."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    worker: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    worker: WorkerId


ChannelEvent = WorkerJoined | Received | ChannelClosed
