"""The way from what the operator knows of a BambooJob to the document of its page. Pure; the time comes in."""

from bamboo_core.page.document import Document, PoolCost, document
from bamboo_operator.status.operated_job import OperatedJob


def page_document(known: OperatedJob, now: float) -> Document:
    """The page of that job. Workers of a job that is over or suspended are as good as gone, as in its status."""
    facts = known.facts
    idle = facts.suspended or known.view.status.ended is not None
    paid = {} if idle else facts.paid if facts.paid is not None else facts.pods
    pools = (
        PoolCost(
            name=pool.name,
            capacity=pool.capacity.value,
            workers=paid.get(pool.name, 0),
            price=None if pool.price_per_hour is None else f"{pool.price_per_hour:f}",
        )
        for pool in facts.pools
    )
    return document(known.view, known.record, place="cluster", now=now, pools=tuple(pools))
