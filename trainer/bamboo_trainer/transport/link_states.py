"""Which links to a peer stand, and so which breaks and recoveries are news. Bookkeeping, without a lock."""

from bamboo_core.planning.plan import WorkerId
from bamboo_trainer.transport.wire import Lane


class LinkStates:
    """One direction of links. Of lanes that break together only the first is news; each one that heals is.

    Each is, because whoever sends again at the first recovery had its frames for the other lane dropped.
    """

    def __init__(self) -> None:
        self._broken: set[tuple[WorkerId, Lane]] = set()
        self._told: set[WorkerId] = set()

    def broke(self, peer: WorkerId, lane: Lane) -> bool:
        """True if a LinkDown is due."""
        if (peer, lane) in self._broken:
            return False
        self._broken.add((peer, lane))
        due = peer not in self._told
        self._told.add(peer)
        return due

    def stands(self, peer: WorkerId, lane: Lane) -> bool:
        """True if a LinkUp is due."""
        if (peer, lane) not in self._broken:
            return False
        self._broken.discard((peer, lane))
        self._told.discard(peer)
        return True

    def forget(self, peer: WorkerId) -> None:
        self._told.discard(peer)
        self._broken = {(other, lane) for other, lane in self._broken if other != peer}
