"""A job's cost is the same on its page, in metrics and on the command line."""

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pytest

from bamboo.terminal import phrases
from bamboo_core.job.api_object import written
from bamboo_core.job.status import BambooJobStatus
from bamboo_core.metrics import job_catalog
from bamboo_core.metrics.exposition import Exporter, MetricsPage
from bamboo_core.page.history import JobHistory
from bamboo_core.view.job_view import view_of
from bamboo_operator.http.metrics import job_page
from bamboo_operator.http.page_document import page_document
from bamboo_operator.jobs.meter import JobMeter, OperatorCounts
from bamboo_operator.pods.pools import cost_of, price_per_hour
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import EarlierCounts, StatusFacts
from bamboo_operator.status.operated_job import OperatedJob
from job_metrics_kit import values
from operator_kit import NOW, job, said, viewed

SPOT = {"name": "spot", "pricePerHour": "1.00"}
SURE = {"name": "sure", "capacity": "OnDemand", "pricePerHour": "3.50", "afterSeconds": 300}


@dataclass(frozen=True)
class Amounts:
    """What one of the views says of a job's cost; None: nothing."""

    total: float | None
    per_hour: float | None
    at_end: float | None


def on_the_page(known: OperatedJob) -> Amounts:
    found = page_document(known, NOW.timestamp())
    total, per_hour = (
        None if one is None else float(one) for one in (found.status.cost.total, found.status.cost.per_hour)
    )
    return Amounts(total, per_hour, found.cost_at_end)


def in_metrics(known: OperatedJob) -> Amounts:
    page = MetricsPage(Exporter.OPERATOR)
    job_page(page, known, JobMeter(OperatorCounts()))
    catalog = job_catalog.JOB_COST_SO_FAR, job_catalog.JOB_COST_PER_HOUR
    total, per_hour = (values(page, metric).get(()) for metric in catalog)
    return Amounts(total, per_hour, None)


def on_the_command_line(line: str) -> Amounts:
    def number(pattern: str) -> float | None:
        found = re.search(pattern, line)
        return None if found is None else float(found[1])

    return Amounts(number(r"([\d.]+) so far"), number(r"([\d.]+) an hour"), number(r"about ([\d.]+) at the end"))


FREE = {"name": "free"}
BARE = [{"name": "spot"}, {"name": "sure", "capacity": "OnDemand"}]


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize(
    ("pools", "paid", "expected"),
    [
        ([SPOT, SURE], {"spot": 3}, Amounts(8.0, 3.0, 14.0)),
        ([SPOT, SURE], {"spot": 2, "sure": 1}, Amounts(13.0, 5.5, 24.0)),
        ([SPOT | {"pricePerHour": "4.00"}, SURE], {"spot": 1}, Amounts(10.0, 4.0, 18.0)),
        ([SPOT, SURE, FREE], {"spot": 1, "free": 2}, Amounts(4.0, 1.0, 6.0)),
        ([SPOT], {"spot": 3}, Amounts(8.0, 3.0, 14.0)),
        (BARE, {"spot": 3}, Amounts(2.0, None, None)),
    ],
)
def test_all_views_tell_the_same(
    pools: list[dict[str, Any]], paid: dict[str, int], expected: Amounts, suspend: bool
) -> None:
    """Of a job that has run for two hours with these workers after 2 were paid, and will for two more."""
    spec = job(nodePools=pools, suspend=suspend)
    facts = StatusFacts(
        now=NOW,
        generation=1,
        spec=spec,
        pods=paid,
        paid=paid,
        earlier=EarlierCounts(cost=Decimal(2)),
        cost=cost_of(price_per_hour(spec.node_pools, paid), 7200),
    )
    status = job_status(said(eta_seconds=7200.0), BambooJobStatus(), facts)
    line = phrases.cost(view_of({"metadata": {}, "spec": {"nodePools": pools}, "status": written(status)}))
    if suspend:
        nothing = None if expected.per_hour is None else 0.0
        expected = replace(expected, per_hour=nothing, at_end=None)
    view = viewed(spec, status, said(eta_seconds=7200.0))
    known = OperatedJob(view=view, facts=facts, record=JobHistory(lambda: NOW.timestamp()))
    assert on_the_page(known) == expected
    assert on_the_command_line(line) == expected
    assert in_metrics(known) == replace(expected, at_end=None)
    unpriced = [pool["name"] for pool in pools if "pricePerHour" not in pool]
    assert ("of which no price is given" in line) == bool(unpriced)
