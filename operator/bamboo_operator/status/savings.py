"""What a job has saved: what its workers cost, against what they would have cost on demand, by its own pools' prices.

It is kept in the job's status, so that the next operator goes on from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation

from msgspec.structs import replace

from bamboo_core.job.api_object import whole_seconds
from bamboo_core.job.placement_spec import Capacity, NodePool, priced_pool
from bamboo_core.job.status import JobCost
from bamboo_operator.pods.pools import cost_of, price_per_hour

_CENTS = Decimal("0.0001")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostComparison:
    """A comparison since a time: what was paid, and what the same workers would have cost on demand."""

    since: datetime | None = None  # None: nothing was ever compared
    spent: Decimal = Decimal(0)
    on_demand: Decimal = Decimal(0)

    @classmethod
    def of(cls, cost: JobCost) -> "CostComparison":
        """The comparison as it was written last; a new one if there is none, or it is of another version."""
        if cost.compared_since is None or cost.on_demand_total is None or cost.saved is None:
            return cls()
        try:
            on_demand, saved = Decimal(cost.on_demand_total), Decimal(cost.saved)
        except InvalidOperation:
            return cls()
        return cls(since=cost.compared_since, spent=on_demand - saved, on_demand=on_demand)

    @property
    def saved(self) -> Decimal:
        """Less than 0 if the workers cost more."""
        return self.on_demand - self.spent

    def later(
        self, pools: Sequence[NodePool], paid: Mapping[str, int], seconds: float, now: datetime
    ) -> "CostComparison":
        """The comparison so many seconds later, with so many workers paid in each pool; unchanged without a price to
        compare with.
        """
        instead = on_demand_per_hour(pools, paid)
        if instead is None:
            return self
        return CostComparison(
            since=self.since or now,
            spent=self.spent + cost_of(price_per_hour(pools, paid), seconds),
            on_demand=self.on_demand + cost_of(instead, seconds),
        )

    def added_to(self, cost: JobCost) -> JobCost:
        """The cost with what it is compared with, if it is."""
        if self.since is None:
            return cost
        on_demand, saved = self.on_demand.quantize(_CENTS), self.saved.quantize(_CENTS)
        since = whole_seconds(self.since)
        return replace(cost, on_demand_total=f"{on_demand:f}", saved=f"{saved + 0:f}", compared_since=since)


def on_demand_pool(pools: Sequence[NodePool]) -> NodePool | None:
    """The pool whose price spot workers are compared with."""
    return priced_pool(pools, Capacity.ON_DEMAND)


def on_demand_per_hour(pools: Sequence[NodePool], paid: Mapping[str, int]) -> Decimal | None:
    """What these workers would cost in an hour at the on-demand pool's price; None if no such pool has one.

    Workers in pools without a price count nothing, here as in the cost.
    """
    reference = on_demand_pool(pools)
    if reference is None or reference.price_per_hour is None:
        return None
    return reference.price_per_hour * sum(paid.get(pool.name, 0) for pool in pools if pool.price_per_hour is not None)
