"""The way from what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

from collections.abc import Sequence
from decimal import Decimal

from msgspec.structs import replace

from bamboo_core.job.placement_spec import NodePool
from bamboo_core.page import document as d
from bamboo_core.page.builder import document, state_in_status, unix
from bamboo_core.page.forecast import at_the_end
from bamboo_operator.pods.pools import price_per_hour
from bamboo_operator.status.operated_job import OperatedJob

NO_PRICE = "No price is given: set pricePerHour in the job's nodePools."


def page_document(known: OperatedJob, now: float) -> d.Document:
    """The page of that job."""
    view = known.view
    found = document(view, known.record, place="cluster", began=unix(view.status.start_time), now=now)
    return replace(found, cost=cost(known, found.progress.eta_seconds))


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
    return d.PageCost(
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
        sentence=_what_is_missing(pools),
    )


def _what_is_missing(pools: Sequence[NodePool]) -> str:
    """A sentence on the prices that are missing; empty if none is."""
    unpriced = [pool.name for pool in pools if pool.price_per_hour is None]
    if len(unpriced) == len(pools):
        return NO_PRICE
    return f"Not included is what has no price: pool {', '.join(unpriced)}." if unpriced else ""
