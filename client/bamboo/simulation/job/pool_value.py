"""In which order a simulated job asks its spot pools for nodes: as listed, or by what the operator would have recorded.

The order is the operator's own (`planning/pool_order`). What it would have recorded of nodes is counted here: they are
seen from when a worker is first placed on one until it goes, and are lost if they are taken away while they are used.
"""

from collections.abc import Mapping, Sequence

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.planning.hazards import HOUR, NOT_SEEN, Exposure, Place
from bamboo_core.planning.pool_order import LossCost, PoolRank, rank_pools


class SeenPools:
    """Alone writes what was seen of pools' nodes, and which pool is asked first. Times are seconds."""

    def __init__(self) -> None:
        self._there: dict[str, tuple[Place, float]] = {}
        self._gone: dict[Place, Exposure] = {}
        self._first = ""

    def placed(self, node: str, place: Place, now: float) -> None:
        """A worker is placed on the node."""
        self._there.setdefault(node, (place, now))

    def went(self, node: str, now: float, *, lost: bool) -> None:
        """The node is not seen any more, or not used."""
        if (known := self._there.pop(node, None)) is not None:
            place, since = known
            seen = Exposure(losses=int(lost), hours=(now - since) / HOUR)
            self._gone[place] = self._gone.get(place, NOT_SEEN) + seen

    def exposures(self, now: float) -> Mapping[Place, Exposure]:
        found = dict(self._gone)
        for place, since in self._there.values():
            found[place] = found.get(place, NOT_SEEN) + Exposure(hours=(now - since) / HOUR)
        return found

    def rank(self, pools: Sequence[NodePool], loss: LossCost, now: float) -> tuple[PoolRank, ...]:
        """The pools at the prices of now, in the order in which they are asked."""
        ranks = rank_pools(pools, self.exposures(now), loss, (), self._first)
        self._first = ranks[0].name if ranks else ""
        return ranks
