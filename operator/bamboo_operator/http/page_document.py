"""Conversion of a BambooJob's known state into the document of its page. Pure; the time is an argument."""

from bamboo_core.page.document import Document, PoolCost, document
from bamboo_operator.status.operated_job import OperatedJob


def page_document(known: OperatedJob, now: float) -> Document:
    """Return the document of a job's page. Workers of an ended or suspended job are not shown, as in its status."""
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
