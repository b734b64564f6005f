"""Which worker is given back because the job has more than it wants, as after `kubectl scale` to fewer pipelines."""

from collections.abc import Collection, Mapping

from bamboo.planning.plan import WorkerId
from bamboo_operator.pools import Pools


def surplus(
    pools: Pools,
    placed: Mapping[WorkerId, str],
    waiting: Collection[WorkerId],
    standby: Collection[WorkerId],
    leaving: Collection[WorkerId],
    wanted: int,
) -> WorkerId | None:
    """One at a time: None while any worker is leaving, and while nobody is idle.

    placed: the pool of each worker that is there or comes; waiting: those of them without a node, which go first;
    standby: those that hold no stage. Of the others the one in the last pool goes.
    """
    if leaving or len(placed) <= wanted:
        return None
    order = {pool.name: index for index, pool in enumerate(pools)}
    idle = [w for w in waiting if w in placed] or [w for w in standby if w in placed]
    return max(idle, key=lambda w: (order.get(placed[w], -1), len(w), w), default=None)
