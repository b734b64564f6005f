"""In which order one job's pools are asked for workers: as they are listed, or by what an hour costs, with losses."""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from bamboo_core.coordinator.events import Emit
from bamboo_core.job.placement_spec import NodePool
from bamboo_core.job.spec import JobSpec, PoolOrder
from bamboo_core.planning.hazards import Exposure, Place
from bamboo_core.planning.plan import WorkerId
from bamboo_core.planning.pool_order import (
    COOLDOWN_SECONDS,
    PATIENCE_SECONDS,
    LossCost,
    PoolRank,
    in_order,
    rank_pools,
    still_failing,
    told_order,
)
from bamboo_operator.pods.pools import Counts, choose_pool, price_per_hour
from bamboo_operator.prices.pool_prices import priced_pools
from bamboo_operator.prices.source import PriceSource

START_SECONDS: Final = 60.0  # for which a new worker usually has its node before it trains


class PoolChoice:
    """Alone writes in which order a job's pools are asked. seen: what is recorded of pools by zone. record: takes
    events for the user. first: the pool that was first for the operator before this one; "" if none was.
    """

    def __init__(
        self,
        seen: Callable[[], Mapping[Place, Exposure]],
        prices: PriceSource,
        record: Callable[[Emit], None],
        first: str = "",
    ) -> None:
        self._seen, self._prices, self._emit = seen, prices, record
        self._first = first
        self._failed: dict[str, float] = {}  # pools that have lately given no workers, and when that was seen last
        self._refused: WorkerId = ""  # the newest worker that did not fit
        self._since: dict[WorkerId, float] = {}  # when pods that find no node began to look for one
        self._waiting: Mapping[str, float] = {}  # since when one of them finds none, by its pool
        self.ranks: tuple[PoolRank, ...] = ()  # the first one comes next; () if pools are asked as they are listed

    def look(
        self,
        spec: JobSpec,
        paid: Counts,
        waiting: Mapping[WorkerId, tuple[str, float]],
        loss: float,
        now: float,
        refused: tuple[WorkerId, str] | None = None,
    ) -> None:
        """Ranks the pools anew. paid: workers that have a node, by pool; waiting: those that find none, with their pool
        and since when; loss: seconds of the whole job that the loss of a worker costs; now: time.monotonic(). refused:
        the newest worker that did not fit to the others, and its pool.
        """
        if spec.pool_order is PoolOrder.LISTED or len(spec.node_pools) < 2:
            self.ranks, self._failed, self._since, self._waiting = (), {}, {}, {}
            return
        self._since = {name: min(since, self._since.get(name, since)) for name, (_, since) in waiting.items()}
        oldest: dict[str, float] = {}
        for name, (pool, _) in waiting.items():
            oldest[pool] = min(self._since[name], oldest.get(pool, now))
        self._waiting = oldest
        if refused is not None and refused[0] != self._refused:
            self._refused, pool = refused
            self._failed[pool] = now
        self._failed = still_failing(self._failed, self._waiting, now)
        pools = priced_pools(spec, self._prices.current, {})
        job = float(price_per_hour(pools, paid) or Decimal(0))
        cost = LossCost(seconds=loss, job=job, start=START_SECONDS)
        self.ranks = rank_pools(pools, self._seen(), cost, self._failed, self._first)
        first = self.ranks[0].name if self.ranks else ""
        if first != self._first:
            self._emit(Emit("PoolChosen", told_order(self.ranks)))
        self._first = first

    def ordered(self, pools: Sequence[NodePool]) -> tuple[NodePool, ...]:
        """The pools in the order in which they are asked."""
        return in_order(pools, self.ranks)

    def elsewhere(self, pools: Sequence[NodePool], current: str, counts: Counts) -> NodePool | None:
        """The pool in which a pod is made anew whose own has lately given no workers; None to go on waiting."""
        target = choose_pool(pools, 0.0, None, counts)
        if current not in self._failed or target is None or target.name in self._failed:
            return None
        return target if target.name != current else None

    @property
    def deadlines(self) -> tuple[float, ...]:
        """The times (time.monotonic()) at which the order may be another one though nothing has happened."""
        patience = (since + PATIENCE_SECONDS for since in self._waiting.values())
        return (*patience, *(at + COOLDOWN_SECONDS for at in self._failed.values()))
