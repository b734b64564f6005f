"""Places of a local run's workers: made-up nodes in made-up zones, as in a cluster. No I/O."""

from collections.abc import Collection, Iterator

import msgspec

from bamboo_core.control.protocol import WorkerJoined
from bamboo_core.coordinator.events import Event
from bamboo_core.planning.plan import WorkerId

ZONES = ("zone-a", "zone-b", "zone-c")


class LocalPlaces:
    """The nodes and zones of a local run's workers.

    per_node: workers of a node, which are lost together. A node that has been full never gets another worker.
    """

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._nodes: dict[WorkerId, int] = {}

    def next(self) -> tuple[WorkerId, str]:
        """Return a new worker's name and zone."""
        number = len(self._nodes)
        node = self._nodes[f"w{number}"] = number // self._per_node
        return f"w{number}", ZONES[node % len(ZONES)]

    def node(self, worker: WorkerId) -> str:
        """Return the worker's node; "" if each node has one worker."""
        return f"node-{self._nodes[worker]}" if self._per_node > 1 else ""

    def lost_with(self, worker: WorkerId, alive: Collection[WorkerId]) -> Iterator[WorkerId]:
        """Return the other living workers on the worker's node."""
        mine = self._nodes.get(worker)
        return (w for w in alive if w != worker and self._nodes.get(w) == mine)

    def located(self, event: Event) -> Event:
        """Return the event with the node of a joining worker."""
        if not isinstance(event, WorkerJoined) or event.hello.worker not in self._nodes:
            return event
        return WorkerJoined(msgspec.structs.replace(event.hello, node=self.node(event.hello.worker)))
