"""The way from what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

from collections.abc import Mapping, Sequence
from decimal import Decimal

from msgspec.structs import replace

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.page import document as d
from bamboo_core.page.builder import document, state_in_status, unix
from bamboo_core.page.forecast import at_the_end
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.operated_job import OperatedJob
from bamboo_operator.status.savings import CostComparison, on_demand_per_hour, on_demand_pool

NO_PRICE = "No price is given: set pricePerHour in the job's nodePools."
NO_ON_DEMAND = "No pool with capacity OnDemand has a price, so there is nothing to compare with."


def page_document(known: OperatedJob, now: float) -> d.Document:
    """The page of that job."""
    view = known.view
    found = document(view, known.record, place="cluster", began=unix(view.status.start_time), now=now)
    checkpoint, price = found.checkpoint, view.status.cost.repeated
    if checkpoint is not None and price is not None:
        so_far = known.facts.earlier.repeated_cost + known.facts.repeated_cost
        checkpoint = replace(checkpoint, repeated_cost=float(max(so_far, Decimal(price))))
    return replace(found, checkpoint=checkpoint, cost=cost(known, found.progress.eta_seconds))


def cost(known: OperatedJob, seconds_left: float | None) -> d.PageCost | None:
    """The cost of a job; None without pools: then there is nothing that could have a price. seconds_left: until the
    last step. Workers of a job that is over or suspended are as good as gone, as in its status.

    Workers of a job that is over or suspended are as good as gone, as in its status.
    """
    pools = known.facts.pools
    if not pools:
        return None
    facts = known.facts
    idle = state_in_status(known.view.status).over or facts.suspended
    paid = {} if idle else facts.paid if facts.paid is not None else facts.pods
    per_hour = price_per_hour(pools, paid)
    total = max(facts.earlier.cost + facts.cost, Decimal(known.view.status.cost.total or 0))
    if per_hour is None and not total:
        return d.PageCost(sentence=NO_PRICE)
    left = None if idle or per_hour is None else seconds_left
    found = d.PageCost(
        total=float(total),
        per_hour=None if per_hour is None else float(per_hour),
        at_end=at_the_end(float(total), float(per_hour or 0), left),
        pools=tuple(
            d.PoolCost(
                name=pool.name,
                capacity=pool.capacity.value,
                workers=paid.get(pool.name, 0),
                price=None if pool.price_per_hour is None else f"{pool.price_per_hour:f}",
            )
            for pool in pools
        ),
    )
    found = _compared(found, facts.comparison, pools, paid, left)
    return replace(found, sentence=_what_is_missing(pools, compared=found.on_demand_pool is not None))


def _what_is_missing(pools: Sequence[NodePool], *, compared: bool) -> str:
    """A sentence on the prices that are missing; empty if none is."""
    unpriced = [pool.name for pool in pools if pool.price_per_hour is None]
    if len(unpriced) == len(pools):
        return NO_PRICE
    told = [f"Not included is what has no price: pool {', '.join(unpriced)}."] if unpriced else []
    return " ".join(told if compared else [*told, NO_ON_DEMAND])


def _compared(
    found: d.PageCost,
    counted: CostComparison,
    pools: Sequence[NodePool],
    paid: Mapping[str, int],
    seconds_left: float | None,
) -> d.PageCost:
    """The cost with what was counted for the comparison, also if there is nothing to compare with any more."""
    reference, instead = on_demand_pool(pools), on_demand_per_hour(pools, paid)
    if counted.since is not None:
        found = replace(
            found,
            compared_since=counted.since.timestamp(),
            spent=float(counted.spent),
            on_demand=float(counted.on_demand),
        )
    if reference is None or instead is None:
        return found
    if counted.since is not None:
        at_end = at_the_end((found.total or 0.0) + float(counted.saved), float(instead), seconds_left)
        found = replace(found, on_demand_at_end=at_end)
    return replace(found, on_demand_pool=reference.name, on_demand_per_hour=float(instead))
