"""Which links to a peer work, so that each break and recovery is reported once. No lock."""

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport.wire import Lane


class LinkStates:
    """The links of one direction. When several lanes break together only the first is reported; every recovery is.

    Each recovery is reported because frames for a lane that was still broken were dropped when another one recovered.
    """

    def __init__(self) -> None:
        self._broken: set[tuple[WorkerId, Lane]] = set()
        self._reported: set[WorkerId] = set()

    def broke(self, peer: WorkerId, lane: Lane) -> bool:
        """Record a break; return whether a LinkDown is due."""
        if (peer, lane) in self._broken:
            return False
        self._broken.add((peer, lane))
        due = peer not in self._reported
        self._reported.add(peer)
        return due

    def stands(self, peer: WorkerId, lane: Lane) -> bool:
        """Record a recovery; return whether a LinkUp is due."""
        if (peer, lane) not in self._broken:
            return False
        self._broken.discard((peer, lane))
        self._reported.discard(peer)
        return True

    def forget(self, peer: WorkerId) -> None:
        self._reported.discard(peer)
        self._broken = {(other, lane) for other, lane in self._broken if other != peer}
