"""The coordinator, as a worker's engine sees it."""

from typing import Protocol

from bamboo_core.control.protocol import Message


class Coordinator(Protocol):
    """Sends messages to the coordinator. Its answers reach the engine later, through the caller that runs it."""

    def tell(self, message: Message) -> None:
        """Send a message without waiting, from any thread."""
