"""What a job has saved against on-demand prices, and what of it the job's status keeps."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from bamboo.remote.job_view import phrases
from bamboo.remote.job_view.parsing import job_of
from bamboo_operator.status.document import job_status
from bamboo_operator.status.facts import StatusFacts
from bamboo_operator.status.savings import CostComparison
from operator_kit import NOW, job, said

SPOT = {"name": "spot", "pricePerHour": "1.00"}
SURE = {"name": "sure", "capacity": "OnDemand", "pricePerHour": "3.50", "afterSeconds": 300}
LATER = datetime(2026, 3, 2, tzinfo=UTC)


def compared(pools: list[dict[str, Any]], paid: dict[str, int], hours: int = 2) -> CostComparison:
    found, spec = CostComparison(), job(nodePools=pools)
    for _ in range(hours):
        found = found.later(spec.node_pools, paid, 3600.0, NOW if found.since is None else LATER)
    return found


@pytest.mark.parametrize(
    ("pools", "paid", "spent", "on_demand"),
    [
        ([SPOT, SURE], {"spot": 3}, "6", "21"),
        ([SPOT, SURE], {"spot": 3, "sure": 1}, "13", "28"),
        ([SPOT, SURE, {"name": "free"}], {"spot": 1, "free": 9}, "2", "7"),
        ([SPOT | {"pricePerHour": "4.00"}, SURE], {"spot": 1}, "8", "7"),
        ([SPOT], {"spot": 3}, "0", "0"),
        ([SPOT, {k: v for k, v in SURE.items() if k != "pricePerHour"}], {"spot": 3}, "0", "0"),
    ],
)
def test_the_same_workers_at_the_on_demand_pools_price(
    pools: list[dict[str, Any]], paid: dict[str, int], spent: str, on_demand: str
) -> None:
    found = compared(pools, paid)
    assert (found.spent, found.on_demand) == (Decimal(spent), Decimal(on_demand))
    assert (found.since is None) == (on_demand == "0")
    assert CostComparison.of({"cost": found.written()}) == found, "as the next operator finds it"


@pytest.mark.parametrize(
    "cost",
    [{}, {"total": "3"}, {"saved": "x", "onDemandTotal": "1", "comparedSince": "2026-03-01T12:00:00Z"},
     {"saved": "1", "onDemandTotal": "1", "comparedSince": "yesterday"}, {"saved": None, "onDemandTotal": 3}],
)  # fmt: skip
def test_a_status_without_it_or_of_another_version_begins_anew(cost: dict[str, Any]) -> None:
    assert CostComparison.of({"cost": cost}) == CostComparison()


@pytest.mark.parametrize(
    ("price", "said_so"),
    [("1.00", "5.0000 less than on demand"), ("4.00", "1.0000 more than on demand")],
)
def test_the_command_line_says_it(price: str, said_so: str) -> None:
    pools = [SPOT | {"pricePerHour": price}, SURE]
    facts = StatusFacts(
        now=NOW, generation=1, spec=job(nodePools=pools), pods={"spot": 1}, cost=Decimal(2),
        comparison=compared(pools, {"spot": 1}),
    )  # fmt: skip
    status = job_status(said(), {}, facts)
    assert phrases.cost(job_of({"metadata": {}, "spec": {}, "status": status})).endswith(said_so)
