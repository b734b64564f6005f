"""The coordinator, as a worker's engine sees it."""

from typing import Protocol

from bamboo_core.control.protocol import Message


class Coordinator(Protocol):
    """Whoever runs the engine passes on what is told, and comes back later with what is answered."""

    def tell(self, message: Message) -> None:
        """Any thread may say something; none waits for it."""
